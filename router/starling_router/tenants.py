"""The tenants that share a service: a file says who they are, and a folder, as of a Secret, has the keys of each."""

import hashlib
import hmac
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import yaml
from starling_agent.file_stamp import file_stamp
from starling_engine.errors import ConfigError

SETTING = "tenants_file"
FIELDS = ("name", "priority", "weight", "tokensPerMinute", "concurrent", "keys", "seesAll")
MOST_PRIORITY, MOST_TENANTS = 1000, 1000
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
log = structlog.get_logger("starling.router")


@dataclass(frozen=True, slots=True)
class Tenant:
    """Shares a service with others.

    priority            a higher one goes first
    weight              its part of the tokens where requests wait, to those of others with the same priority
    tokens_per_minute   of prompts and outputs; None: no limit
    concurrent          requests at once; None: no limit
    keys                name of the file with its keys
    sees_all            its keys show all servers and tenants at /ui; those of others show their own tenant
    """

    name: str
    priority: int = 0
    weight: float = 1.0
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    keys: str = ""
    sees_all: bool = False


def read_tenants(file: Path) -> list[Tenant]:
    """Reads the tenants of a YAML file. Raises ConfigError that names the file, the field and what is possible."""
    try:
        entries = yaml.safe_load(file.read_bytes())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read: {' '.join(str(error).split())}", SETTING) from None
    if not isinstance(entries, list) or not 0 < len(entries) <= MOST_TENANTS:
        raise ConfigError(f"{file}: must be a list of 1 to {MOST_TENANTS} tenants, such as '- name: chat'", SETTING)
    tenants = [_tenant(f"{file}: [{number}]", entry) for number, entry in enumerate(entries)]
    for what in ("name", "keys"):
        values = [getattr(tenant, what) for tenant in tenants]
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise ConfigError(f"{file}: two tenants have the {what} {twice!r}; each needs its own", SETTING)
    return tenants


def _tenant(where: str, entry: object) -> Tenant:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must have fields, such as 'name: chat'", SETTING)
    if unknown := [field for field in entry if field not in FIELDS]:
        raise ConfigError(f"{where}.{unknown[0]} is unknown; there are {', '.join(FIELDS)}", SETTING)
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where}.name must be of a-z, 0-9 and -, 63 at most, got {name!r}", SETTING)
    keys = entry.get("keys", name)
    if not isinstance(keys, str) or not _FILE.fullmatch(keys):
        raise ConfigError(f"{where}.keys must be the name of a file in the folder of keys, got {keys!r}", SETTING)
    sees_all = entry.get("seesAll", False)
    if not isinstance(sees_all, bool):
        raise ConfigError(f"{where}.seesAll must be true or false, got {sees_all!r}", SETTING)
    return Tenant(
        name,
        int(_number(where, entry, "priority", 0, -MOST_PRIORITY, MOST_PRIORITY, whole=True)),
        _number(where, entry, "weight", 1.0, 0.001, 1000.0),
        _limit(where, entry, "tokensPerMinute"),
        _limit(where, entry, "concurrent"),
        keys,
        sees_all,
    )


def _limit(where: str, entry: Mapping[str, Any], field: str) -> int | None:
    return None if field not in entry else int(_number(where, entry, field, 0, 1, 10**12, whole=True))


def _number(
    where: str, entry: Mapping[str, Any], field: str, default: float, low: float, high: float, *, whole: bool = False
) -> float:
    value = entry.get(field, default)
    fits = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or not low <= value <= high:
        raise ConfigError(
            f"{where}.{field} must be a {'whole ' if whole else ''}number in [{low:g}, {high:g}], got {value!r}", SETTING
        )
    return float(value) if not whole else value


class _NoKey(ConfigError):
    """A tenant's file cannot be read, or has no key."""


class TenantKeys:
    """The keys of tenants, one a line in a file for each, read again when it changes: a key that is taken out is known no longer.

    Fails closed: a tenant whose file cannot be read has no key. Keys are compared as digests, in constant time.
    """

    def __init__(self, tenants: Sequence[Tenant], folder: Path) -> None:
        """Raises ConfigError if no tenant has a key, and for a key that two of them have."""
        self._files = {tenant: folder / tenant.keys for tenant in tenants}
        self._stamps = {tenant: file_stamp(file) for tenant, file in self._files.items()}
        self._digests: dict[Tenant, list[bytes]] = {tenant: [] for tenant in tenants}
        self._said: dict[Tenant, str] = {}
        """Causes why no key of a tenant is let in, as they were logged: a file may be read with each request."""
        problems = [problem for tenant in tenants if (problem := self._first_read(tenant)) is not None]
        if len(problems) == len(tenants):
            raise problems[0]

    def _first_read(self, tenant: Tenant) -> _NoKey | None:
        """Reads the keys of a tenant. One that has none any more keeps no router from serving the others."""
        try:
            self._digests[tenant] = self._read(tenant)
        except _NoKey as problem:
            log.error("no key of the tenant is let in", tenant=tenant.name, cause=str(problem))
            return problem
        return None

    def owner(self, key: bytes) -> Tenant | None:
        """Returns the tenant whose key it is now."""
        asked = hashlib.sha256(key).digest()
        found = self._find(asked)
        if not self._read_if_changed(self._files if found is None else (found,)):
            return found
        return self._find(asked) or self._find_new(asked)

    def _find_new(self, asked: bytes) -> Tenant | None:
        """Looks for a key that was taken from one tenant and given to another one."""
        return self._find(asked) if self._read_if_changed(self._files) else None

    def _find(self, asked: bytes) -> Tenant | None:
        matches = [tenant for tenant, digests in self._digests.items() for each in digests if hmac.compare_digest(asked, each)]
        return matches[0] if matches else None

    def _read_if_changed(self, tenants: Iterable[Tenant]) -> bool:
        """Reads files that changed. Returns whether one has."""
        stamps = {tenant: file_stamp(self._files[tenant]) for tenant in tenants}
        changed = [tenant for tenant, stamp in stamps.items() if stamp != self._stamps[tenant]]
        for tenant in changed:
            self._stamps[tenant], self._digests[tenant] = stamps[tenant], []
        for tenant in changed:
            self._read_again(tenant)
        return bool(changed)

    def _read_again(self, tenant: Tenant) -> None:
        try:
            self._digests[tenant] = self._read(tenant)
            self._said.pop(tenant, None)
            log.info("keys of a tenant read again", tenant=tenant.name, keys=len(self._digests[tenant]))
        except ConfigError as error:
            if self._said.get(tenant) != str(error):
                log.error("no key of the tenant is let in", tenant=tenant.name, cause=str(error))
            self._said[tenant] = str(error)
            if not isinstance(error, _NoKey):
                self._stamps[tenant] = None  # another tenant's file may let it in, as soon as that one has the key no longer

    def _read(self, tenant: Tenant) -> list[bytes]:
        file = self._files[tenant]
        try:
            lines = [line.strip() for line in file.read_bytes().splitlines()]
        except OSError as error:
            raise _NoKey(f"the keys of tenant {tenant.name}: {file} cannot be read: {error.strerror}", SETTING) from None
        keys = dict.fromkeys(line for line in lines if line and not line.startswith(b"#"))
        if not keys:
            raise _NoKey(f"the keys of tenant {tenant.name}: {file} has none; it needs one a line", SETTING)
        digests = [hashlib.sha256(key).digest() for key in keys]
        for other, taken in self._digests.items():
            if other != tenant and (both := set(taken) & set(digests)):
                lines_of = [number for number, line in enumerate(lines, 1) if hashlib.sha256(line).digest() in both]
                raise ConfigError(f"{file}: the key in line {lines_of[0]} is tenant {other.name}'s, too; each has its own", SETTING)
        return digests


@dataclass(frozen=True, slots=True)
class Tenancy:
    """The tenants and their keys. Each of so many `routers` gives its part of the quotas. Without keys there are no tenants."""

    tenants: Sequence[Tenant] = ()
    keys: TenantKeys | None = None
    routers: int = 1

    @classmethod
    def read(cls, file: Path, keys: Path | None, routers: int) -> "Tenancy":
        """Reads tenants, and their keys in a folder: `keys` beside the file if none is given. Raises ConfigError."""
        tenants = read_tenants(file)
        for tenant in tenants:
            if tenant.concurrent is not None and tenant.concurrent < routers:
                why = "each router gives one request at once at least"
                log.warning("a tenant may have more than `concurrent`", tenant=tenant.name, may_have=routers, cause=why)
        return cls(tenants, TenantKeys(tenants, keys or file.parent / "keys"), routers)


NO_TENANTS = Tenancy()
