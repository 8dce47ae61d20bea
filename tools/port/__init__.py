"""Methods that TRL and verl lack, as plug-ins: docs/port.md says how to use them."""
