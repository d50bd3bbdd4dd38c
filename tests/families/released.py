"""Tokens that released tokenizers add, by first id; tiny checkpoints lack most."""

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

QWEN = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> "
    "<|box_start|> <|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> "
    "<|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> <tool_call> "
    "</tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> "
    "<|repo_name|> <|file_sep|> "
)
QWEN3 = f"{QWEN}<tool_response> </tool_response> <think> </think> "
HIGGS_TAGS = (
    "emotion:elation amusement enthusiasm determination pride contentment affection "
    "relief contemplation confusion surprise awe longing arousal anger fear disgust "
    "bitterness sadness shame helplessness env:music noise style:singing shouting "
    "whispering sfx:cough laughter crying screaming burping humming sigh sniff sneeze "
    "prosody:speed_very_slow speed_slow speed_fast speed_very_fast pitch_low "
    "pitch_high pause long_pause"
)
ADDED = {
    "breeze_tts_2": {
        0: "<pad> <eos> <bos> <unk> <mask>",
        105: "<start_of_turn> <end_of_turn>",
        168: "<table>",
        255_999: "<start_of_image> <end_of_image>",
        262_144: "<|AUDIO|> <|audio_eos|> [S0] [S1] [S2] [S3] [S4] [S5] [S6] [S7] [S8] "
        "[S9] <ins_bos> <ins_eos>",
    },
    "higgs_audio_v3": {
        151_643: f"{QWEN}<|asr|> <|streaming_asr|> <|tts|> <|streaming_tts|> "
        "<|audio_cont_txt|> <|audio|> <|audio_end|> <|text|> <|text_end|> <|eoc|> "
        "<|user|> <|assistant|> <|system|> <|await_audio|> <|ref_audio|> <|ref_text|>",
        151_724: "<|chatml|> <|prosody:expressive_high|> <|prosody:expressive_low|>",
    },
    "omnivoice": {
        151_643: f"{QWEN3}<|denoise|> <|lang_start|> <|lang_end|> <|instruct_start|> "
        "<|instruct_end|> <|text_start|> <|text_end|>"
    },
    "qwen3_tts": {
        151_643: f"{QWEN3}<|audio_start|> <|audio_end|> <tts_pad> <tts_text_bos> "
        "<tts_text_eod> <tts_text_bos_single> <|audio_pad|>"
    },
}
# Not special: added for the sake of texts.
PLAIN = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"}
PLAIN |= {"<think>", "</think>", "<table>"}


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A family's, with a token for each byte beside those that are added."""
    ids: dict[str, int] = {
        token: first + place
        for first, tokens in ADDED[name].items()
        for place, token in enumerate(tokens.split())
    }
    kind = ""
    for place, tag in enumerate(HIGGS_TAGS.split() if name == "higgs_audio_v3" else ()):
        kind, _, last = tag.rpartition(":") if ":" in tag else (kind, "", tag)
        ids[f"<|{kind}:{last}|>"] = 151_681 + place
    added, letters = [*ids], iter(sorted(pre_tokenizers.ByteLevel.alphabet()))
    for place in sorted(set(range(max(ids.values()))) - set(ids.values())):
        ids[next(letters, f"unused {place}")] = place
    made = Tokenizer(models.BPE(vocab=ids, merges=[]))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    for token in added:
        add = made.add_tokens if token in PLAIN else made.add_special_tokens
        add([AddedToken(token, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=made)
