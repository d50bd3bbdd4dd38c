"""The Higgs Audio tokenizer: 24 kHz samples to the codes that several families speak.

Higgs Audio v2 and v3 and OmniVoice have it in their checkpoints, or beside them. What a
family does with a clip before is its own, and in its encoder's fingerprint.
"""
