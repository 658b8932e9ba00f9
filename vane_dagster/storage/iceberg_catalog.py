"""Iceberg catalogs as users declare them, opened by `pyiceberg`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vane_dagster._arguments import check_installed, text
from vane_dagster._secrets import keep_options, revealed
from vane_dagster.errors import DefinitionError

DEFAULT_CATALOG = "default"
"""The name of a catalog that is declared by its properties alone, as in pyiceberg."""
_SQL_TABLES = 2
"""The tables that pyiceberg creates in a new SQL catalog, which others may do at the same time."""
_IDENTIFIER = re.compile(r"[^.\s{}]+(\.[^.\s{}]+)+")
_FSSPEC_NAMES = {
    "s3.access-key-id": "key",
    "s3.secret-access-key": "secret",
    "s3.session-token": "token",
    "s3.endpoint": "endpoint_url",
    "adls.account-name": "account_name",
    "adls.account-key": "account_key",
    "adls.connection-string": "connection_string",
    "adls.sas-token": "sas_token",
    "gcs.project-id": "project",
}


@dataclass(frozen=True)
class IcebergCatalog:
    """A declared catalog. Its properties may hold secrets and are never part of a key.

    Attributes:
        name: Its name in pyiceberg's configuration, and in the catalog's own database.
        properties: Properties for pyiceberg, which take precedence over its configuration.
    """

    name: str
    properties: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def open(self) -> Any:
        """Open the catalog as a `pyiceberg.catalog.Catalog`."""
        from pyiceberg.catalog import load_catalog

        keep_options(self.properties)
        properties = {name: str(v) for name, v in revealed(self.properties).items()}
        for _ in range(_SQL_TABLES):
            try:
                return load_catalog(self.name, **properties)
            except Exception as error:  # of SQLAlchemy, which a catalog need not use
                if "already exists" not in str(error):
                    raise
        return load_catalog(self.name, **properties)

    def table(self, identifier: str) -> Any:
        """Load the current metadata of a table; None if the table does not exist."""
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        try:
            return self.open().load_table(identifier)
        except (NoSuchTableError, NoSuchNamespaceError):
            return None

    def storage_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return options of fsspec for the catalog's files."""
        from pyiceberg.utils.config import Config

        configured = {**(Config().get_catalog_config(self.name) or {}), **self.properties}
        options = {
            own: configured[name] for name, own in _FSSPEC_NAMES.items() if name in configured
        }
        if region := configured.get("s3.region"):
            options["client_kwargs"] = {"region_name": region}
        return {**options, **given}


def parse_catalog(where: str, catalog: Any) -> IcebergCatalog:
    """Validate a declared catalog."""
    check_installed(where, "pyiceberg", "iceberg")
    if isinstance(catalog, str) and catalog:
        return IcebergCatalog(catalog)
    if isinstance(catalog, Mapping):
        properties: Any = dict(catalog)
        name = properties.pop("name", DEFAULT_CATALOG)
    else:
        name, properties = getattr(catalog, "name", None), getattr(catalog, "properties", None)
    if not isinstance(name, str) or not isinstance(properties, Mapping):
        raise DefinitionError(
            f"{where}: catalog is a {type(catalog).__name__}; expected the name of a catalog in "
            'pyiceberg\'s configuration, such as "prod", or its properties, like {"type": "sql", '
            '"uri": ...}'
        )
    return IcebergCatalog(name, dict(properties))


def parse_identifier(where: str, table: Any) -> str:
    """Validate the identifier of a table."""
    expected = 'the namespace and name of an Iceberg table, such as "db.events"'
    return text(where, "table", table, expected, _IDENTIFIER)
