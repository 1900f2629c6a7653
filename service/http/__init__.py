"""The HTTP face of a service: a stateless FastAPI application that asks the registry for everything it says."""
