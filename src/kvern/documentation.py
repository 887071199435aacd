"""The texts below the fields of a class, for `--help WORD` and for the API's description."""

import ast
import functools
import inspect
import textwrap


@functools.cache
def field_documents(kind: type) -> dict[str, str]:
    """Returns the docstring below each field in the class's source; "" if there is none."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    documents: dict[str, str] = {}
    name = None
    for statement in tree.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            documents[name] = ""
        elif name is not None and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            documents[name] = inspect.cleandoc(str(statement.value.value))
            name = None
        else:
            name = None
    return documents
