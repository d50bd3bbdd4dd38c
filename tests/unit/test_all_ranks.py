"""Two processes of a torch group, as the ranks of a tensor-parallel worker are."""

import multiprocessing

import pytest
from torch import distributed

from vllm_tts_cache.model_executor.agreement import all_of_group


def rank(number, rendezvous, answers, results):
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=number, world_size=2
    )
    all_say = all_of_group(distributed.group.WORLD)
    results.put((number, [all_say(pair[number]) for pair in answers]))
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_all_ranks_hear_the_same_and_one_no_is_a_no(tmp_path):
    answers = [(True, True), (True, False), (False, True), (False, False)]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(
            target=rank, args=(number, tmp_path / "rendezvous", answers, results)
        )
        for number in range(2)
    ]
    for process in ranks:
        process.start()
    heard = dict(results.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(60)
    assert heard[0] == heard[1] == [True, False, False, False]
