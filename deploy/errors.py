"""Errors of starting and configuring.

DeployError
├── SettingsError   a setting is unknown, misspelt or has an impossible value
├── StartError      the cluster can't start, or the model can't be served
└── ClientError     a running cluster does not answer a command of ours, or answers with an error

The command line prints the text of each as one sentence, without a traceback.
"""

__all__ = ["ClientError", "DeployError", "SettingsError", "StartError"]


class DeployError(Exception):
    """Base of every error that `deploy` raises on purpose; its text is one sentence for the operator."""


class SettingsError(DeployError):
    """A setting that can't be used. `key` is where it was found: a key path, a variable's name, or None."""

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class StartError(DeployError):
    """The cluster did not come up."""


class ClientError(DeployError):
    """The cluster that a command talks to can't be reached, or refuses."""
