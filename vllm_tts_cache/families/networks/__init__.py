"""What the encoders of several families are made of."""
