"""VoxCPM2 requests through the host's real routes, serving class and adapter."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers import dynamic_module_utils
from vllm_omni.model_executor.models.voxcpm2 import voxcpm2_talker as host

from tests.families.serving import ann, message, served
from tests.families.voxcpm2.case import CASE
from tests.speaking import data_url, wav
from tests.speech_server import running
from vllm_tts_cache.errors import InvalidSpeakerError
from vllm_tts_cache.families.networks.prompts import MODE
from vllm_tts_cache.families.voxcpm2.prompt import TEXT_IDS, VoxCPM2Prompts
from vllm_tts_cache.speaker.reference import FIELD

SPOKEN = "What is said in it."


async def test_a_prompt_is_as_long_as_the_hosts_without_audio(server, own_checkpoint):
    from transformers import AutoTokenizer

    await ann(server)
    assert (await server.speak(voice="Ann")).status_code == 200
    assert (await server.speak(voice="Ann", ref_text=SPOKEN)).status_code == 200
    tokenizer = AutoTokenizer.from_pretrained(own_checkpoint)
    split_map = host.build_cjk_split_map(tokenizer)
    for prompt, ref_text in zip(server.engine.prompts, (None, SPOKEN), strict=True):
        expected = host.build_voxcpm2_prompt(
            server.engine.model_config.hf_config,
            tokenizer,
            split_map,
            "Hello.",
            ref_audio=torch.zeros(48_000),
            ref_sr=24_000,
            ref_text=ref_text,
        )
        assert prompt["prompt_token_ids"] == expected["prompt_token_ids"]
        told = prompt["additional_information"]
        assert set(told) == {FIELD, MODE, TEXT_IDS}
        (hosts_ids,) = expected["additional_information"][TEXT_IDS]
        assert told[TEXT_IDS][0][-len(hosts_ids) :] == hosts_ids


def test_a_batch_job_reads_a_tokenizer_beside_it(own_checkpoint, tmp_path, monkeypatch):
    """As the released one's does; the tiny one's is of transformers."""
    modules = str(tmp_path / "modules")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", modules)
    monkeypatch.syspath_prepend(modules)
    checkpoint = shutil.copytree(own_checkpoint, tmp_path / "checkpoint")
    name = "VoxCPM2Tokenizer"
    code = f"from transformers import LlamaTokenizerFast as T\nclass {name}(T): pass\n"
    (checkpoint / "tokenization_voxcpm2.py").write_text(code)
    path = checkpoint / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": name}
    config["auto_map"] = {"AutoTokenizer": [f"tokenization_voxcpm2.{name}", None]}
    path.write_text(json.dumps(config))
    prompts = VoxCPM2Prompts(str(checkpoint), {}, lambda *_: pytest.fail("needs none"))
    builder = prompts._builder
    builder.check_text("text", "Hello.")
    with pytest.raises(InvalidSpeakerError, match="<s>"):
        builder.check_text("text", "<s>Hello.")


async def test_an_own_preset_stays_the_hosts(own_checkpoint, tmp_path, monkeypatch):
    presets = tmp_path / "presets"
    write_preset(presets, "Narrator", num_positions=20)
    server = served(
        CASE, own_checkpoint, tmp_path, monkeypatch, custom_voice_dir=str(presets)
    )
    async with running(server):
        assert (await server.speak(voice="Narrator")).status_code == 200
        told = server.engine.prompts[0]["additional_information"]
        assert told["voice_name"] == "narrator" and FIELD not in told
        assert told["voice_profile"]["ref_audio_feat_len"] == 20
        assert "built-in" in message(await server.register("narrator", wav()))
        given = await server.speak(voice="Narrator", ref_audio=data_url())
        assert given.status_code == 200
        infos = [prompt["additional_information"] for prompt in server.engine.prompts]
        assert [info.get(MODE) for info in infos] == [None, "reference"]


def write_preset(directory, name, num_positions):
    """As the host reads precomputed profiles."""
    directory.mkdir()
    save_file(
        {"ref_audio_feat": torch.zeros(num_positions, 4, 64)},
        directory / "preset.safetensors",
    )
    voices = {name: {"file": "preset.safetensors"}}
    manifest = {"model_type": "voxcpm2", "voices": voices}
    (directory / "custom_voice_manifest.json").write_text(json.dumps(manifest))
