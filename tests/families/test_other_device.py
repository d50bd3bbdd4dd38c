"""Each encoder and each prefill on a device that is not there.

An operation over two devices fails as on a card, and what is made is what a CPU makes,
bit for bit.
"""

from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

from benchmarks.gpu_check.other_device import CPU, another_device, move
from tests.families import runner, test_reference_rows
from tests.families.cases import cloning_cases, of
from tests.families.clip import noisy_tone
from tests.families.test_encoders import all_encoded
from vllm_tts_cache.speaker.checkpoint_dir import read_json

# Of these the one or the other is in their own folders.
BIG, UNLOADED = "audio8_tts", ("breeze_tts_2", "omnivoice")


@of(case for case in cloning_cases() if case.name != BIG)
@pytest.mark.usefixtures("one_thread")
def test_an_encoder_computes_where_it_was_loaded_to(own_case, own_checkpoint):
    load, clip = own_case.family.part("encoders_part"), noisy_tone(110_000, 44_100)
    expected = all_encoded(load(own_checkpoint, CPU), clip)
    with another_device() as device:
        assert all_encoded(load(own_checkpoint, device), clip) == expected


@of(case for case in cloning_cases() if case.name not in UNLOADED)
def test_it_is_built_where_the_talker_is(own_case, own_checkpoint, talker, monkeypatch):
    def fail(_info, cause):
        raise cause

    monkeypatch.setattr(talker, "_fail", fail)
    prefills = [*prefills_of(own_case, own_checkpoint, talker)]
    expected = [prefill(CPU) for prefill in prefills]
    with another_device() as device:
        move(talker)
        made = [prefill(device) for prefill in prefills]
        assert {rows.device for rows in made} == {device}
        assert all(map(torch.equal, (rows.cpu() for rows in made), expected))


def prefills_of(case, checkpoint, talker):
    """Of each mode, whole and in chunks."""
    if case.name in test_reference_rows.NAMES:
        part = import_module(f"tests.families.{case.name}.voices")
        bench = part.Bench(talker, checkpoint)
        prefills = [partial(by_bench, bench, bench.voice(), bench.voice().ids)]
    else:  # "instruct" has no prompt in a batch job
        modes = [mode for mode in case.family.modes if mode.name != "instruct"]
        prompts = [prompt_of(case, checkpoint, talker, mode) for mode in modes]
        prefills = [partial(by_runner, talker, prompt) for prompt in prompts]
    return [partial(each, chunk) for each in prefills for chunk in (None, 16)]


def by_bench(bench, voice, ids, chunk, device):
    voice.ids = ids.to(device)
    return test_reference_rows.prefill(bench, voice, chunk=chunk)


def by_runner(talker, prompt, chunk, device):
    ids = torch.tensor(prompt["prompt_token_ids"]).to(device)
    info, name = prompt["additional_information"], f"{device} {len(ids)} {chunk}"
    return runner.prefill(talker.preprocess, ids, info, chunk=chunk, name=name)[0]


def prompt_of(case, checkpoint, talker, mode):
    encoders, speakers = case.family.encoders, talker.tts_cache_speakers
    samples = noisy_tone(40_000).samples
    voice: Any = runner.StoredVoice(speakers, samples, 16_000, encoders)
    voice.mode, voice.ref_text = mode, "What is said in the reference."
    config = read_json(checkpoint / "config.json")
    prompts = case.family.part("offline_part")(str(checkpoint), config, None)
    return prompts.prompt(voice, "The keeper counts the ships.", "Auto")
