"""What may be said to each family: its tags, and no token of a prompt's structure."""

import re
from contextlib import suppress
from functools import partial
from importlib import import_module

from transformers import AutoTokenizer
from vllm_omni.diffusion.models.omnivoice.pipeline_omnivoice import _combine_text
from vllm_omni.model_executor.models.cosyvoice3.tokenizer import CosyVoice3Tokenizer

from tests.families import released
from tests.families.cases import cloning_cases, of
from tests.families.serving import ann, message
from tests.speaking import data_url
from vllm_tts_cache.errors import InvalidSpeakerError
from vllm_tts_cache.families.higgs_audio_v3.prompt import PromptBuilder
from vllm_tts_cache.families.omnivoice.prompt import check_text
from vllm_tts_cache.speaker.family import refuse_tokens

CLONING = cloning_cases()
SPOKEN = "What is said in it."
# Of tokens that are special all the same.
TAGS = {
    "cosyvoice3": r"\[.+\]|</?(laughter|strong)>|<\|endofprompt\|>",
    "higgs_audio_v3": r"<\|(emotion|env|prosody|sfx|style):\w+\|>",
}
BY_SHAPE = ("audio8_tts", "fish_speech")  # all that look like a token but tags
JOINTS = ("\n", "\r\n", " ", "\t", "\0", "\u200b", "\u3000", "\u4f60", "\u0301")


def reading(case, checkpoint):
    """What checks a text in the API process, what the model reads, and all tokens."""
    name, more = case.name, ({},) if case.name == "voxcpm2" else ()
    if name == "cosyvoice3":
        hosts = CosyVoice3Tokenizer(checkpoint / "CosyVoice-BlankEN")
        made, encode = hosts.tokenizer, hosts.encode
    else:
        is_known = name in released.ADDED
        read = AutoTokenizer.from_pretrained
        hosts = made = released.tokenizer(name) if is_known else read(checkpoint)
        encode = partial(made.encode, add_special_tokens=False)
    if name == "qwen3_tts":
        check = partial(refuse_tokens, case.family.control.names)
    elif name == "omnivoice":
        check, encode = check_text, lambda text: made.encode(_combine_text(text))
    else:
        part = import_module(f"vllm_tts_cache.families.{name}.prompt")
        check = part.PromptBuilder(hosts, *more).check_text
    return check, encode, made.get_added_vocab()


@of([case for case in CLONING if case.name not in BY_SHAPE])
def test_a_released_token_is_refused_unless_it_is_for_texts(own_case, own_checkpoint):
    check, ids_of, added = reading(own_case, own_checkpoint)
    tag = re.compile(TAGS.get(own_case.name, ""))
    allowed = {t for t in added if t in released.PLAIN or tag.fullmatch(t)}
    if own_case.name in ("omnivoice", "qwen3_tts"):  # no tokenizer is at hand
        allowed = added.keys() - own_case.family.control.names
    refused = {token: added[token] for token in added.keys() - allowed}
    for token, token_id in added.items():
        for text in (token, f"a{token}b", f"Hello. {token}"):
            try:
                check("input", text)
            except InvalidSpeakerError as exc:
                assert token in refused and "input" in str(exc) and token in str(exc)
            else:
                assert token in allowed and token_id in ids_of(text)
    for token in refused:
        for place in range(1, len(token)):
            for joint in JOINTS:  # which the host may take out again
                text = f"{token[:place]}{joint}{token[place:]}"
                with suppress(InvalidSpeakerError):
                    check("input", text)
                    assert set(refused.values()).isdisjoint(ids_of(text)), text


@of([case for case in CLONING if case.name == "higgs_audio_v3"])
async def test_tags_reach_the_prompt_as_the_tokenizers_own_ids(server, own_case):
    tokenizer = released.tokenizer(own_case.name)
    server.handler._get_tts_adapter()._builder = PromptBuilder(tokenizer)
    added = tokenizer.get_added_vocab()
    tags = {tag: token_id for tag, token_id in added.items() if ":" in tag}
    assert len(tags) == 45 and added["<|style:whispering|>"] == 151_706
    for tag, token_id in tags.items():
        text = f"{tag}Hello.{tag}"
        for who in ({"ref_audio": data_url(), "ref_text": f"{SPOKEN}{tag}"}, {}):
            answer = await server.speak(input=text, **who)
            assert answer.status_code == 200, answer.text
            ids = server.engine.prompts[-1]["prompt_token_ids"]
            assert ids.count(token_id) == (3 if who else 2)
            begin = ids.index(tokenizer.convert_tokens_to_ids("<|text|>")) + 1
            assert ids[begin:-1] == tokenizer.encode(text, add_special_tokens=False)


@of([case for case in CLONING if case.name == "cosyvoice3"])
async def test_a_prompt_has_one_mark_behind_which_it_is_spoken(server):
    mark, cross = "<|endofprompt|>", {"extra_params": {"clone_mode": "cross_lingual"}}
    await ann(server, ref_text=SPOKEN)
    for field, fields in (
        ("input", {"input": f"Hello.{mark}"}),
        ("ref_text", {"ref_text": f"{mark}Hello.{mark}"}),
        ("input", {"input": f"{mark}Hello.{mark}", **cross}),
        ("instructions", {"instructions": f"{mark}{mark}"}),
        ("input", {"input": f"Hello.{mark}", "instructions": "low"}),
    ):
        said = message(await server.speak(voice="Ann", **fields))
        assert field in said and mark in said
    assert not server.engine.prompts and not any(server.encodes.values())
    answer = await server.speak(voice="Ann", input="[laughter]<strong>Hello.</strong>")
    assert answer.status_code == 200, answer.text
