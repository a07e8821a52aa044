"""The packages of the wheel; everything else is in pyproject.toml.

``cache_tools`` and ``templates`` stand at the top of a checkout and under ``mlagen`` once
installed: as top-level names, one is a letter away from another package and the other is anybody's.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["mlagen", "mlagen.*"]),
        *(f"mlagen.{name}" for name in find_packages(include=["cache_tools", "cache_tools.*"])),
        "mlagen.templates",
    ],
    package_dir={"mlagen.cache_tools": "cache_tools", "mlagen.templates": "templates"},
)
