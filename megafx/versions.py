"""Versions of packages, which trees that are on PYTHONPATH without being installed do not state."""

from importlib.metadata import PackageNotFoundError, version


def version_of(package: str) -> str:
    """What the package's metadata states, "unknown" where there is none. Does not import the package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
