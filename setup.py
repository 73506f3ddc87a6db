from setuptools import setup

setup()  # everything about the package is in pyproject.toml
