"""Other people's formats: checkpoints in either layout, and the models that read them."""
