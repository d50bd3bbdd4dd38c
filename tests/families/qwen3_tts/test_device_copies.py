"""A clone's prefill never waits for the device: on the real talker, and a fake device.

A ``meta`` tensor has a shape and no numbers, so whatever would wait for one (``item``,
``cpu``, a branch on a value) raises; and each copy that goes there is recorded, with
whether it was from pinned memory and waited. What is made on another device is compared
in the shared `test_other_device`.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.families.test_other_device import prompt_of
from vllm_tts_cache.families.qwen3_tts.family import IN_CONTEXT

META = torch.device("meta")
copies = torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default


class Recorded(TorchDispatchMode):
    """Notes copies to the device: number of values, waits, from pinned memory."""

    def __init__(self):
        super().__init__()
        self.copies, self.pinned = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func in copies and made.device == META:
            source = args[1] if func is copies[1] else args[0]
            if source.device.type == "cpu":
                waits = not (kwargs or {}).get("non_blocking", False)
                is_pinned = source.data_ptr() in {t.data_ptr() for t in self.pinned}
                self.copies.append((source.numel(), waits, is_pinned))
        return made


@torch.no_grad()  # and not inference mode, in which torch shows no copy
def test_a_prefill_copies_its_encodings_pinned_and_waits_for_nothing(
    own_case, own_checkpoint, talker, monkeypatch
):
    prompt = prompt_of(own_case, own_checkpoint, talker, IN_CONTEXT)
    info, recorded = prompt["additional_information"], Recorded()
    shape = (*info["ref_code_length"], 16)

    def pin_memory(tensor):
        recorded.pinned.append(tensor.clone())  # alive, with an address of its own
        return recorded.pinned[-1]

    # As where there is an accelerator, and as the second runner has the talker.
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    talker._use_v2_model_runner = True
    talker.to(META)
    # It was given the buffer before that moved.
    talker._prompt_builder._tts_pad_embed_buffer = talker._tts_pad_embed
    buffers = {"request": info}
    with recorded:
        talker.preprocess_batch(
            req_ids=["request"], model_intermediate_buffer=buffers, device=META
        )
        recorded.copies.clear()
        ids = torch.ones(len(prompt["prompt_token_ids"]), dtype=torch.long, device=META)
        _, rows, update = talker.preprocess(
            ids, None, **buffers["request"], request_id="request", _omni_is_prefill=True
        )
    assert "request" not in talker._failed_requests
    assert rows.device == update["codes"]["ref"].device == META
    assert update["codes"]["ref"].shape == shape
    assert (shape[0] * shape[1], False, True) in recorded.copies
    assert [num for num, waits, pinned in recorded.copies if waits or not pinned] == []
    assert len(recorded.copies) == 2
