"""Pictures of the encodings, in one look, for files, pages and terminals."""
