"""What the talker of Higgs Audio v3 samples: of each request by itself."""

import torch
from transformers import AutoTokenizer

from tests.families.higgs_audio_v3.voices import SPOKEN, TEXT, begin_step
from tests.families.runner import clip_of
from tests.in_process_workers import clip
from tests.sampling import drawing, greedy
from vllm_tts_cache.families.higgs_audio_v3.family import FAMILY, IN_CONTEXT
from vllm_tts_cache.families.higgs_audio_v3.prompt import PromptBuilder

AUDIO = 151_670
BOC = 1024  # of a codebook that has not begun


def test_a_checkpoint_that_takes_no_transcript_is_told_none(own_checkpoint):
    mute = PromptBuilder(AutoTokenizer.from_pretrained(own_checkpoint))
    mute.hosts.ref_text_id = None
    told, plain = (
        mute.clone(TEXT, spoken, mode=IN_CONTEXT, clip=clip_of(clip()))
        for spoken in (SPOKEN, None)
    )
    assert told == plain


def test_a_failed_request_samples_the_id_that_ends_it(talker):
    """The host samples by itself: what its logits say of a text id is masked."""
    talker._failed_requests._ids["one"] = None
    talker.set_batch_req_ids(["one", "other"])
    begin_step(talker, [torch.tensor([151_670])] * 2, ["one", "other"])
    hidden = torch.randn(2, talker.config.hidden_size, dtype=torch.bfloat16)
    with torch.inference_mode():
        logits = talker.compute_logits(hidden)
        output = talker.sample(logits, greedy(2))
    ids = output.sampled_token_ids.flatten().tolist()
    assert ids == [FAMILY.failure_id, talker._audio_continuation_id]


def drawn(talker, request_id, seed, *, neighbours=()):
    """The codes of two steps of a new request, with ``neighbours`` in the first."""
    hidden = torch.randn(
        1, talker.config.hidden_size, generator=torch.Generator().manual_seed(1)
    )
    generators, codes = {0: torch.Generator().manual_seed(seed)}, []
    for others in (neighbours, ()):
        ids = [torch.tensor([AUDIO])] + [torch.tensor([300, AUDIO])] * len(others)
        rows = hidden.to(torch.bfloat16).repeat(len(ids), 1)
        with torch.inference_mode():
            talker.set_batch_req_ids([request_id, *others])
            begin_step(talker, ids, [request_id, *others])
            logits = talker.compute_logits(rows)
            talker.sample(logits, drawing(len(ids), generators))
            published, *_ = [talker.postprocess(rows) for _ in ids]
        codes.append(published["codes"]["audio"])
    return torch.cat(codes)


def test_what_is_drawn_for_a_request_depends_on_no_neighbour(talker):
    """The host draws once more in each step in which one of its rows does not speak."""
    alone = drawn(talker, "alone", seed=5)
    assert not torch.equal(drawn(talker, "another", seed=6), alone)
    for name, others in (("again", ()), ("beside", ("newcomer",))):
        assert torch.equal(drawn(talker, name, seed=5, neighbours=others), alone)


def test_what_was_published_stays_as_it_is(talker):
    """The host sends it only when the next step has been sampled."""
    first, second = drawn(talker, "speaks", seed=5)
    assert first[1:].unique().tolist() == [BOC]
    assert second[2:].unique().tolist() == [BOC] and second[1] != BOC
