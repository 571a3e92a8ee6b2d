"""The same small transformer with each encoding, tested past the length it was trained on."""
