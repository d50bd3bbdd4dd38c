"""The Higgs Audio tokenizer: 24 kHz samples to the codes that several families speak.

Higgs Audio v2 and v3 and OmniVoice have it in their checkpoints, or beside them. Each
family prepares a clip in its own way, which is part of its encoder's fingerprint.
"""
