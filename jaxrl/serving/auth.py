"""The token that a server may ask for."""

from __future__ import annotations

import base64
import binascii
import hmac
import os
from collections.abc import Mapping
from pathlib import Path

from jaxrl.errors import AuthenticationError, ConfigError

VARIABLE = "JAXRL_SERVE_TOKEN"
"""Environment variable with the token, where no file is given."""

SHORTEST = 8


def load_token(
    file: str, environment: Mapping[str, str] = os.environ, *, option: str = "--token-file"
) -> str | None:
    """The token in `file`, which `option` names, or, with file "", in the environment; None:
    nobody needs one.

    Raises `ConfigError` for a file that cannot be read, and for a token that is too short or holds
    anything but visible ASCII characters. The message does not show it.
    """
    source = f"{option}={file}" if file else f"the environment variable {VARIABLE}"
    if file:
        try:
            token = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source} cannot be read: {error}") from None
    else:
        token = environment.get(VARIABLE, "").strip()
        if VARIABLE not in environment:
            return None
    if len(token) < SHORTEST or not all("!" <= character <= "~" for character in token):
        rule = f"at least {SHORTEST} visible ASCII characters, without spaces"
        raise ConfigError(f"{source} must hold a token of {rule}")
    return token


def check_header(header: str | None, token: str | None, *, basic: bool = False) -> None:
    """Raise `AuthenticationError` unless the Authorization header carries the token.

    "Bearer TOKEN"; with `basic` also what a browser sends, with the token as the password.
    """
    if token is None:
        return
    scheme, _, given = (header or "").strip().partition(" ")
    given = given.strip()
    if basic and scheme.lower() == "basic":
        given = _password(given)
    elif scheme.lower() != "bearer":
        raise AuthenticationError("this server asks for a token: Authorization: Bearer TOKEN")
    # In constant time: how long it takes must not tell how much of a guess is right.
    if not hmac.compare_digest(given.encode("utf-8", "replace"), token.encode()):
        raise AuthenticationError("the token is not the one that this server asks for")


def _password(encoded: str) -> str:
    try:
        return base64.b64decode(encoded, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return ""
