"""Pictures of the encodings, in one look, for files and pages."""
