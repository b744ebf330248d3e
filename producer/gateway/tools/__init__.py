"""What a model may call: made a form of the answer, and found again in its text."""
