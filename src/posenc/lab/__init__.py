"""What looks at the library: pictures of the encodings, comparisons and measurements."""
