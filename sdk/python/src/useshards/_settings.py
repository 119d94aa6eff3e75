"""The three settings: where the server is, the key, and the CA that signed the server's certificate."""

from __future__ import annotations

import os
import re
import ssl
import warnings
from urllib.parse import urlsplit

from attrs import field, frozen

from ._errors import ConfigurationError

_HOST = re.compile(r"(?!-)[A-Za-z0-9._-]{1,253}")
_IPV6 = re.compile(r"\[[0-9A-Fa-f:.]{2,45}\]")


@frozen
class Settings:
    """What a client needs to reach its server. The key is kept out of every text."""

    remote: str
    api_key: str = field(repr=False)
    tls: ssl.SSLContext | None
    timeout: float | None


def resolve(
    remote: str | None, api_key: str | None, ca_file: str | os.PathLike[str] | None, timeout: float | None, *, stacklevel: int
) -> Settings:
    """Arguments first, then the environment. Raises ConfigurationError, and ValueError for a bad timeout."""
    url = check_remote(remote or os.environ.get("SHARD_REMOTE", ""))
    key = check_key(api_key)
    ca = os.fspath(ca_file) if ca_file else os.environ.get("SHARD_CA_FILE", "")
    if timeout is not None and not timeout > 0:
        raise ValueError("timeout must be a number of seconds above 0, or None")
    tls: ssl.SSLContext | None = None
    if url.startswith("http:"):
        if ca:
            raise ConfigurationError("ca_file: a CA file is for an https remote, and the remote is http")
        warnings.warn("the remote is http: the API key and everything else is sent unencrypted", UserWarning, stacklevel + 1)
    elif ca:
        try:
            tls = ssl.create_default_context(cafile=ca)
        except (OSError, ssl.SSLError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else "it holds no certificate"
            raise ConfigurationError(f"ca_file: cannot read {ca}: {reason}") from None
    return Settings(remote=url, api_key=key, tls=tls, timeout=timeout)


def check_remote(remote: str) -> str:
    """Scheme, host and port of a remote, without a slash at the end."""
    remote = remote.strip()
    if not remote:
        raise ConfigurationError("remote: not set: pass remote= or set SHARD_REMOTE to the URL of shard serve")
    if re.search(r"[\x00-\x20\x7f\\]", remote):
        raise ConfigurationError("remote: the URL holds a space, a backslash or a control character")
    try:
        parts = urlsplit(remote)
        port = parts.port
    except ValueError:
        raise ConfigurationError("remote: the URL is not well formed: write https://host or https://host:port") from None
    if "://" not in remote or not parts.scheme:
        raise ConfigurationError("remote: the URL has no scheme: write https://host or https://host:port")
    if parts.scheme not in ("http", "https"):
        raise ConfigurationError(f'remote: the scheme "{parts.scheme}" is not http or https')
    if "@" in parts.netloc:
        raise ConfigurationError("remote: the URL holds a user: the API key is a setting of its own")
    if parts.path not in ("", "/") or "?" in remote or "#" in remote:
        raise ConfigurationError("remote: the URL goes on after the host: only scheme, host and port belong there")
    host, _, digits = parts.netloc.rpartition(":") if re.search(r":[0-9]*$", parts.netloc) else (parts.netloc, "", "")
    if not (_HOST.fullmatch(host) or _IPV6.fullmatch(host)):
        raise ConfigurationError("remote: the URL has no valid host: write https://host or https://host:port")
    if parts.netloc.endswith(":") or (digits and not 0 < (port or 0) < 65536):
        raise ConfigurationError("remote: the port is not a number from 1 to 65535")
    return f"{parts.scheme}://{host}" + (f":{port}" if port else "")


def check_key(api_key: str | None) -> str:
    """The key, from the argument or SHARD_API_KEY. No message ever shows it."""
    key = os.environ.get("SHARD_API_KEY", "").strip() if api_key is None else api_key
    if not key.strip():
        where = "api_key: not set: pass api_key= or set SHARD_API_KEY" if api_key is None else "api_key: the key is empty"
        raise ConfigurationError(where)
    if not all(" " < c < "\x7f" for c in key):
        raise ConfigurationError("api_key: the key holds a space, a control character or one beyond ASCII")
    return key
