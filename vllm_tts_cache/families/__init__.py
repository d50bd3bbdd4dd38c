"""Model families: their reference encoders and what each cloning mode needs."""
