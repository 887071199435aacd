"""The texts under the fields of a class: what `--help WORD` and the API's description say of them."""

import ast
import functools
import inspect
import textwrap


@functools.cache
def field_documents(kind: type) -> dict[str, str]:
    """By field, the string that stands under it in the class's source; "" if none does."""
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
