"""Tools that use the library: pictures of the encodings, comparisons and measurements."""
