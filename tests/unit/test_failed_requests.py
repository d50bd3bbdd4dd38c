import pytest
import torch

from tests.in_process_workers import SpectrumEncoder, worker_speakers
from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.model_executor.failed_requests import (
    MAX_FAILED_REQUESTS,
    FailedRequests,
    SuspectPrefixes,
)

NO_SPEAKER_PROMPT = 3071
CAUSE = EncodeError("its reference audio is not stored (any more)")


@pytest.fixture
def failed():
    requests = FailedRequests(NO_SPEAKER_PROMPT)
    requests.add("failed", CAUSE, None)
    return requests


def logits(num_rows=3):
    return torch.randn(num_rows, 4_096, generator=torch.Generator().manual_seed(0))


def test_a_failed_request_is_logged_with_its_cause_and_counted(tmp_path, plugin_log):
    speakers = worker_speakers(tmp_path, [SpectrumEncoder("speaker")])
    requests = FailedRequests(NO_SPEAKER_PROMPT)
    requests.add("mine", CAUSE, speakers)
    assert "mine" in requests
    assert "other" not in requests
    assert f"No prompt for request mine: {CAUSE}" in plugin_log.text
    assert speakers.stats().failed_prompts == 1
    assert speakers.failed(["mine", "other"]) == {"mine": str(CAUSE)}
    speakers.close()


def test_a_failed_request_can_sample_one_id_and_its_neighbours_what_they_could(failed):
    given = logits()
    ended = failed.end(given.clone(), ["one", "failed", "two"])
    assert torch.equal(ended[[0, 2]], given[[0, 2]])
    assert ended[1].isfinite().nonzero().flatten().tolist() == [NO_SPEAKER_PROMPT]


def test_where_a_model_samples_by_itself_the_failed_ones_id_is_replaced(failed):
    sampled = torch.tensor([[7], [8], [9]], dtype=torch.int32)
    failed.force(sampled, ["one", "failed", "two"])
    assert sampled.tolist() == [[7], [NO_SPEAKER_PROMPT], [9]]
    # Rows that are not the requests', and a batch of others.
    for others in (["failed"], ["one", "two", "three"]):
        failed.force(sampled, others)
    assert sampled.tolist() == [[7], [NO_SPEAKER_PROMPT], [9]]


@pytest.mark.parametrize("num_rows", [1, 5])
def test_rows_that_are_not_one_a_request_are_left_alone(failed, num_rows):
    given = logits(num_rows)
    assert torch.equal(failed.end(given.clone(), ["one", "failed", "two"]), given)


def test_the_oldest_failures_are_deleted_before_the_list_grows_without_end(failed):
    for number in range(MAX_FAILED_REQUESTS):
        failed.add(str(number), CAUSE, None)
    assert "failed" not in failed
    assert "0" in failed


def test_the_oldest_suspects_are_trusted_before_the_list_grows_without_end():
    suspects = SuspectPrefixes()
    for number in range(MAX_FAILED_REQUESTS + 1):
        suspects.add(str(number))
    assert suspects.rely_on("0", "request")
    assert not suspects.rely_on("1", "request")
