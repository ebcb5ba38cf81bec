"""Who a request belongs to. The key alone decides that, and nothing in the body can."""

__all__ = ["OpenTenants"]


class OpenTenants:
    """The open mode: no keys are set, so every request belongs to the one tenant, whatever key it carries.

    It is for a machine that only its user reaches. Keyed tenants take its place behind the same method.
    """

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant

    def tenant_of(self, authorization: str | None) -> str:
        """The tenant of a request. authorization: its header of that name, if it has one."""
        return self._tenant
