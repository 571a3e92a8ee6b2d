"""Tools that use the library: pictures of the encodings, and a comparison by training."""
