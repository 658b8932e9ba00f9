"""A module that an application of Ray Serve imports."""


def loud(text: str) -> str:
    return f"{text.upper()}!"
