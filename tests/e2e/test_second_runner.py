"""On the host's second runner as well a request fails alone, whatever it asks for."""

import pytest

from tests.beside_a_stream import undisturbed
from tests.e2e import second_runner
from tests.e2e.test_host_routes import IDS, body_for, post, routes_of, unexpected
from tests.e2e.test_hostile_speech import FEW, bodies, send_all
from tests.served import Servers

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="session")
def second(family, checkpoint, tmp_path_factory, make_clip):
    """A server on it, and a client whose voice "keeper" is precomputed."""
    pytest.importorskip("vllm_omni.worker_v2.omni_sampler", reason="since 0.32")
    folder = tmp_path_factory.mktemp("second")
    own = Servers(family, checkpoint, folder)
    variables = {"SPEAKER_CACHE_WARM_KV": "off", **second_runner.prepare(folder / "p")}
    server, client = own.start(stage_0={"model_runner": "v2"}, **variables)
    assert "Bound native MRv2 connector" in server.options.log_path.read_text()
    client.http.headers["Connection"] = "close"
    client.register("keeper", make_clip(), ref_text="Hello there.").raise_for_status()
    client.precompute("keeper").raise_for_status()
    yield server, client
    own.stop()


def test_no_route_and_no_value_ends_the_engine(second):
    server, client = second
    heard = client.speak("Well?", voice="keeper").audio
    with undisturbed(server.url, "keeper"):
        told = post(client, "/v1/completions", body_for("/v1/completions", IDS))
        assert told.status_code == 500 and "The request failed alone" in told.text
        assert not unexpected(server, routes_of(server)[0])
    assert not send_all(server, bodies(*FEW))
    assert client.speak("Well?", voice="keeper").audio == heard
