"""Two processes of a torch group, as the ranks of a tensor-parallel worker are."""

import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from tests.fake_hub import vllm_config
from tests.in_process_workers import SpectrumEncoder, clip, prepare, ref_of, store_clip
from vllm_tts_cache.config import Settings
from vllm_tts_cache.errors import CheckpointError, EncodeError, TTSCacheError
from vllm_tts_cache.model_executor import loading
from vllm_tts_cache.model_executor.speakers import Ranks
from vllm_tts_cache.store.opening import open_store

NAMES = ("speaker", "codec")
ANSWERS = [(True, True), (True, False), (False, True), (False, False)]
WAIT_SECONDS = 120.0

pytestmark = [
    pytest.mark.long,  # each of the two imports what a worker has
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What both ranks heard, loaded and spoke with."""
    directory = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    given = [(number, directory, results) for number in range(2)]
    processes = [context.Process(target=_rank, args=each) for each in given]
    for process in processes:
        process.start()
    told = dict(results.get(timeout=WAIT_SECONDS) for _ in processes)
    for process in processes:
        process.join(WAIT_SECONDS)
    return [SimpleNamespace(**told[number]) for number in range(2)]


def _rank(number, directory, results):
    distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=number, world_size=2
    )
    ranks = Ranks(distributed.group.WORLD)
    told = {"heard": answers_and_words(ranks)} | load_and_speak(ranks, directory)
    results.put((number, told))
    distributed.barrier()
    distributed.destroy_process_group()


def answers_and_words(ranks):
    own = distributed.get_rank()
    heard: list[Any] = [ranks.all_agree(pair[own]) for pair in ANSWERS]
    heard.append(ranks.from_rank_0(lambda: {"codec": "f" * 64, "asked": own}))
    try:
        ranks.from_rank_0(lambda: failing(own))
    except TTSCacheError as exc:
        heard.append((type(exc).__name__, str(exc)))
    heard.append(ranks.from_rank_0(lambda: None))
    return heard


def failing(rank):
    raise CheckpointError("codec.pth", f"not a torch file for rank {rank}")


def load_and_speak(ranks, directory):
    os.environ["SPEAKER_SAMPLES_DIR"] = str(directory / "samples")
    loaded = []

    def load(_model_dir, _device):
        encoders = {name: SpectrumEncoder(name) for name in NAMES}
        loaded.extend(encoders)
        return encoders

    family: Any = SimpleNamespace(
        side_files=(), encodes_on_cpu=False, part=lambda _: load
    )
    config = vllm_config(str(directory), dtype=torch.bfloat16, device="cpu")
    speakers = loading.load_worker_speakers(config, family, ranks)
    refs = voices_of(ranks, directory, speakers)
    found = [spoken(speakers, ref) for ref in refs]
    speakers.close()
    fingerprints = speakers.fingerprints
    return {"loaded": loaded, "fingerprints": fingerprints, "found": found}


def voices_of(ranks, directory, speakers):
    """Rank 0 encodes three clips; of the second and third, others cannot read all."""
    clips = [clip(number) for number in range(4)]
    if ranks.is_first:
        store = open_store(Settings(samples_dir=directory / "samples"))
        for audio in clips[:3]:
            prepare(speakers, store_clip(store, audio), NAMES)
        stored = directory / "samples" / "store"
        for audio, damage in ((clips[1], Path.unlink), (clips[2], truncate)):
            sha, codec = audio.audio_sha256, speakers.fingerprints["codec"]
            damage(stored / sha[:2] / sha / f"{codec}.safetensors")
        store.close()
    distributed.barrier()
    return [ref_of(audio) for audio in clips]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-4])


def spoken(speakers, ref):
    try:
        encodings = speakers.prompt(ref, NAMES)
    except EncodeError as exc:
        return str(exc)
    return {name: encoding["spectrum"] for name, encoding in encodings.items()}


def test_all_ranks_hear_the_same_and_what_rank_0_fails_with(ranks):
    first, second = (rank.heard for rank in ranks)
    assert first[:4] == second[:4] == [True, False, False, False]
    assert first[4] == second[4] == {"codec": "f" * 64, "asked": 0}
    reason = "codec.pth: not a torch file for rank 0"
    assert first[5] == ("CheckpointError", reason)
    assert second[5] == ("TTSCacheError", f"rank 0: {reason}")
    assert first[6] is second[6] is None


def test_only_rank_0_loads_encoders_and_all_know_which(ranks):
    first, second = ranks
    assert first.loaded == list(NAMES)
    assert second.loaded == [], "it loads what rank 0 publishes"
    assert first.fingerprints == second.fingerprints
    assert first.fingerprints.keys() == set(NAMES)


def test_all_ranks_speak_or_none(ranks):
    first, second = (rank.found for rank in ranks)
    whole, *broken, unknown = zip(first, second, strict=True)
    for name in NAMES:
        np.testing.assert_array_equal(whole[0][name], whole[1][name])
    for told in broken:  # rank 0 has them in memory
        assert told == (
            "another rank of this worker could not read its encoding",
            "its codec encoding is not stored",
        )
    assert unknown == ("its speaker and codec encoding is not stored",) * 2
