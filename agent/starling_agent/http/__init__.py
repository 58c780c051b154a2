"""What every request passes before its route: plain ASGI layers that look at headers and leave the body's bytes alone."""
