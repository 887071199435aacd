"""Pages of HTML from templates beside the modules that fill them in."""

from jinja2 import Environment, PackageLoader, StrictUndefined


def render(package: str, template: str, **values: object) -> str:
    """Returns a template in a package's folder with these values, each of which is escaped."""
    environment = Environment(
        loader=PackageLoader(package, "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["tenths"] = "{:.1f}".format
    return environment.get_template(template).render(values)
