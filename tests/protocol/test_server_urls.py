"""URLs of servers of every kind: what they mean, and what is refused without showing a password."""

from __future__ import annotations

import pytest

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.servers import ServerUrl


@pytest.mark.parametrize(
    ("url", "kind", "name"),
    [
        ("redis://u:p@h:1/2", "standalone", "redis://h:1/2"),
        ("rediss://h", "standalone", "rediss://h:6379"),
        ("unix:///run/x.sock?db=1", "standalone", "unix:///run/x.sock"),
        (
            "redis+sentinel://u:p%40@a,b:5/s/1",
            "sentinel",
            "redis+sentinel://a:26379,b:5/s",
        ),
        (
            "rediss+cluster://:p@[::1]:7,b",
            "cluster",
            "rediss+cluster://::1:7,b:6379",
        ),
    ],
)
def test_a_url_says_what_kind_of_server_it_names(url: str, kind: str, name: str) -> None:
    parsed = ServerUrl.parse(url)
    assert (parsed.kind, parsed.name) == (kind, name)
    assert "p@" not in repr(parsed)
    assert "p%40" not in repr(parsed)


def test_a_login_and_a_database_reach_the_connections_behind_sentinels() -> None:
    client = ServerUrl.parse("redis+sentinel://u:p%40@a/s/3").client("{q.0}")
    options = client.connection_pool.connection_kwargs
    assert (options["username"], options["password"], options["db"]) == ("u", "p@", 3)


def test_sentinels_are_asked_with_tls_and_a_login_of_their_own() -> None:
    url = "rediss+sentinel://u:p@a/s?ssl_ca_certs=/ca.pem&sentinel_username=w&sentinel_password=x"
    client = ServerUrl.parse(url).client("{q.0}")
    options = client.connection_pool.connection_kwargs
    assert options["ssl_ca_certs"] == "/ca.pem"
    assert "sentinel_password" not in options
    asked = options["router"]._options
    assert (asked["ssl"], asked["ssl_ca_certs"]) == (True, "/ca.pem")
    assert (asked["username"], asked["password"]) == ("w", "x")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://secret@h",
        "redis://h/x",
        "redis://h:secret",
        "redis://secret@h?nonsense=1",
        "unix://",
        "redis+sentinel://secret@h",
        "redis+sentinel://secret@h/s/x",
        "redis+sentinel://secret@h,,i/s",
        "redis+cluster://secret@h/1",
        "redis+cluster://secret@h:0",
        "redis+cluster://secret@h:99999",
        "redis+cluster://secret@h?nonsense=1",
        "redis+other://secret@h",
    ],
)
def test_what_names_no_server_is_refused_without_showing_a_password(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="url: must be redis://") as caught:
        ServerUrl.parse(url)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None
