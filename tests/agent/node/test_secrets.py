"""Secrets that come late, and change, on a real node."""

from pathlib import Path

import httpx

from tests.agent.node.conftest import Agent, StartAgent


def mount(volume: Path, number: int, keys: str) -> None:
    """Mounts keys as a kubelet does: a folder for each version, and one link that is swapped."""
    version = volume / f"..{number}"
    version.mkdir(parents=True)
    (version / "api-keys").write_text(keys)
    (volume / "..new").symlink_to(version.name)
    (volume / "..new").rename(volume / "..data")
    if not (volume / "api-keys").is_symlink():
        (volume / "api-keys").symlink_to("..data/api-keys")


def status(agent: Agent, key: str) -> int:
    body = {"model": "pydoc", "prompt": "import", "max_tokens": 1}
    return agent.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}).status_code


def test_a_missing_secret_is_reported_and_a_revoked_key_is_refused_without_a_restart(start_agent: StartAgent, tmp_path: Path):
    volume = tmp_path / "secret"
    agent = start_agent(endpoint={"api_key_file": str(volume / "api-keys"), "api_key_secret": "chat-keys"})
    waiting = agent.reports(lambda report: report.last_error is not None)[-1]
    assert waiting.phase == "starting" and "Secret 'chat-keys' is missing" in str(waiting.last_error)
    assert "kubectl create secret generic chat-keys" in str(waiting.last_error)

    mount(volume, 1, "leaked\nkept\n")
    assert agent.until("serving")[-1].last_error is None
    assert [status(agent, key) for key in ("leaked", "kept", "new")] == [200, 200, 401]

    mount(volume, 2, "kept\nnew\n")
    assert [status(agent, key) for key in ("leaked", "kept", "new")] == [401, 200, 200]
    assert agent.report().engine_restarts == 0
    assert httpx.get(f"{agent.url}/v1/models", trust_env=False).status_code == 401
