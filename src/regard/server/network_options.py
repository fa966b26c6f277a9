"""Where a server listens, who may call it, and how large a request may be.

The address is 127.0.0.1 by default; any other address requires a key.
"""

import re
from dataclasses import dataclass

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
TEXT_BODY, MEDIA_BODY = 1 << 20, 26 << 20  # bytes; OpenAI's API takes audio files of 25 MB
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")


@dataclass(frozen=True)
class NetworkOptions:
    """Raises ValueError if other machines or sites could call the server without a key.

    port: 0 selects a free one. keys: those that clients must send; several are tenants, which are served equally and
    share no prefixes. allow_hosts: host names that clients may use besides those of this machine; none for an address
    that other machines can reach: any name. allow_origins: origins, such as "https://app.example", whose pages may call
    the server besides its own page; "*" allows all and requires a key. access_log: log every request to the logger
    `regard.access`. max_body: bytes of a request; None: more if a model reads images or audio. drain: seconds in
    which responses may finish after a signal to exit.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    access_log: bool = False
    max_body: int | None = None
    drain: float = 30.0

    def __post_init__(self) -> None:
        if isinstance(self.keys, str) or not all(isinstance(key, str) and key.strip() for key in self.keys):
            raise ValueError("keys must be a tuple of strings, none of them empty, such as ('secret',)")
        if not self.local and not self.keys:
            raise ValueError(f"host={self.host!r} can be reached from other machines; set a key, or bind 127.0.0.1")
        if "*" in self.allow_origins and not self.keys:
            raise ValueError("allow_origins=('*',) lets any site call the server; set a key or name the origins")
        for origin in self.allow_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(f"the origin {origin!r} must be a scheme and a host, such as https://app.example:8080")

    @property
    def local(self) -> bool:
        """Whether only this machine can connect."""
        return self.host in LOCAL_HOSTS

    @property
    def may_manage(self) -> bool:
        """Whether clients may start processes, and load and remove models: those of this machine, or with a key."""
        return bool(self.keys) or self.local and not self.allow_hosts and not self.allow_origins

    @property
    def host_names(self) -> tuple[str, ...]:
        """The host names that the server accepts; empty: any."""
        return (*LOCAL_HOSTS, *self.allow_hosts) if self.local or self.allow_hosts else ()


LOCAL = NetworkOptions()
