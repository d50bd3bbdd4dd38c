"""What a speaker of any family is: encoders, modes, identities, precision."""
