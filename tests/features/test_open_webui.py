"""Open WebUI finds the voices by the requests that its code sends (0.12.4)."""

from tests.speaking import registered


def listed(answer):
    """As `get_available_voices` of its router reads the answer."""
    answer.raise_for_status()
    return {voice["id"]: voice["name"] for voice in answer.json()["voices"]}


async def base_of(client):
    answer = await client.get("/v1/open_webui")
    answer.raise_for_status()
    return answer.json()["base_url"]


async def test_it_lists_voices_and_speaks(server):
    await registered(server)
    base = await base_of(server.client)
    assert listed(await server.client.get(f"{base}/audio/voices"))["Ann"] == "Ann"
    body = {"input": "Hello.", "voice": "Ann", "model": "m"}
    speech = f"{base}/audio/speech"
    said = await server.client.post(speech, json=body, follow_redirects=True)
    assert (said.status_code, said.headers["X-Speaker-Cache"]) == (200, "hit")
    assert (await server.client.post(f"{base}/chat/completions")).status_code == 404
    for token in ("0" * 32, "x", "%C3%BC"):
        path = f"/open-webui/{token}/audio/voices"
        assert (await server.client.get(path)).status_code == 404


async def test_a_base_is_of_one_tenant_and_gives_names_alone(host):
    for side, name in ((host.us, "Ann"), (host.them, "Bea")):
        await side.register(name, side.clip(), ref_text=side.words)
    ours, theirs = await base_of(host.us.client), await base_of(host.them.client)
    assert ours != theirs
    paths = [f"{base}/audio/voices" for base in (ours, theirs)]
    found = [listed(await host.anyone.get(path)) for path in paths]
    assert [set(names) - {"default"} for names in found] == [{"Ann"}, {"Bea"}]
    assert (await host.anyone.get("/v1/open_webui")).status_code == 401
    speech = f"{ours}/audio/speech"
    body = {"input": "Hello.", "voice": "Ann", "model": "m"}
    for sender, status in ((host.anyone, 401), (host.us.client, 200)):
        said = await sender.post(speech, json=body, follow_redirects=True)
        assert said.status_code == status
