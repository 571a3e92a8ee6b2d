"""What every room agrees on: argument checks, their wording, and when a call may be read."""
