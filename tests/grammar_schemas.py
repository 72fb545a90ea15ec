"""Fifty JSON schemas as people give them to models: records, tool calls, trees, choices, numbers, texts with bounds."""

TEXT, WHOLE, NUMBER, TRUTH = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
SHORT = {"type": "string", "maxLength": 12}
NODE = {"$ref": "#/$defs/node"}


def record(_optional=(), **properties):
    """An object with these entries alone, all required but for the optional ones."""
    required = [name for name in properties if name not in _optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def some(items, least=0, most=4):
    """An array."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def tool(name, **arguments):
    """A call of a function."""
    return record(name={"const": name}, arguments=record(**arguments))


DATE = {"type": "string", "pattern": r"^\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])$"}
EMAIL = {"type": "string", "pattern": r"^[a-z0-9.]{1,16}@[a-z0-9]{1,12}\.(com|org|net)$"}
SCHEMAS = {
    "a whole number": WHOLE,
    "a number": NUMBER,
    "a truth value": TRUTH,
    "null": {"type": "null"},
    "a short text": SHORT,
    "a text with a least length": {"type": "string", "minLength": 3, "maxLength": 9},
    "one of texts": {"enum": ["red", "green", "blue", "dark green"]},
    "one of values": {"enum": [1, "one", None, True, [1, 2], {"a": 1}]},
    "a constant": {"const": {"version": 2, "kind": "x"}},
    "a range of whole numbers": {"type": "integer", "minimum": -5, "maximum": 1234},
    "a range of numbers": {"type": "number", "minimum": 0, "maximum": 1},
    "an exclusive range": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    "a multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    "a date by pattern": DATE,
    "an address by pattern": EMAIL,
    "a date by format": {"type": "string", "format": "date"},
    "a time by format": {"type": "string", "format": "date-time"},
    "an id by format": {"type": "string", "format": "uuid"},
    "a plate": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,4}$"},
    "numbers": some(NUMBER),
    "at least two": some(WHOLE, 2, 5),
    "a pair": {"type": "array", "prefixItems": [SHORT, WHOLE], "items": False, "minItems": 2, "maxItems": 2},
    "a matrix": some(some(WHOLE, 2, 2), 2, 2),
    "texts or numbers": some({"type": ["string", "integer"], "maxLength": 8}),
    "a person": record(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 150}),
    "a person with options": record(("email", "born"), name=SHORT, email=EMAIL, born=DATE),
    "all optional": record(("a", "b", "c"), a=WHOLE, b=TRUTH, c=SHORT),
    "empty": record(),
    "a nested record": record(user=record(name=SHORT, home=record(street=SHORT, number=WHOLE)), active=TRUTH),
    "records in an array": record(items=some(record(sku=SHORT, price=NUMBER), 1)),
    "a map": {"type": "object", "additionalProperties": WHOLE, "maxProperties": 3},
    "a map of records": record(by_name={"type": "object", "additionalProperties": record(n=WHOLE), "maxProperties": 2}),
    "known and other entries": {"type": "object", "properties": {"a": WHOLE}, "required": ["a"],
                                "additionalProperties": SHORT, "maxProperties": 3},
    "null or a record": {"anyOf": [{"type": "null"}, record(x=NUMBER, y=NUMBER)]},
    "one of two records": {"oneOf": [record(kind={"const": "circle"}, r=NUMBER),
                                     record(kind={"const": "box"}, w=NUMBER)]},
    "both of two": {"allOf": [{"type": "object", "properties": {"a": WHOLE}, "required": ["a"]},
                              {"type": "object", "properties": {"b": TRUTH}, "required": ["b"]}],
                    "maxProperties": 2},
    "a tool call": tool("search", query=SHORT, limit={"type": "integer", "minimum": 1, "maximum": 50}),
    "one of three tools": {"anyOf": [tool("search", query=SHORT), tool("add", a=NUMBER, b=NUMBER), tool("stop")]},
    "calls of tools": some({"anyOf": [tool("read", path=SHORT), tool("write", path=SHORT, text=SHORT)]}, 1, 3),
    "an answer with steps": record(steps=some(record(thought=SHORT, result=SHORT), 1, 3), answer=SHORT),
    "a label with confidence": record(label={"enum": ["spam", "ham"]},
                                      confidence={"type": "number", "minimum": 0, "maximum": 1}),
    "entities": record(entities=some(record(text=SHORT, kind={"enum": ["person", "place"]}, start=WHOLE), 0, 3)),
    "a tree": {"$defs": {"node": record(value=WHOLE, children=some(NODE, 0, 2))}, **NODE},
    "a list of links": {"$defs": {"node": record(value=WHOLE, next={"anyOf": [{"type": "null"}, NODE]})}, **NODE},
    "an expression": {"$defs": {"node": {"anyOf": [WHOLE, record(op={"enum": ["+", "*"]}, left=NODE, right=NODE)]}},
                      **NODE},
    "shared definitions": {"$defs": {"point": record(x=NUMBER, y=NUMBER)},
                           **record(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"})},
    "many entries": record(**{f"field_{i}": (WHOLE, SHORT, TRUTH, NUMBER)[i % 4] for i in range(24)}),
    "a long enumeration": record(country={"enum": [f"country {i * 7919 % 10007}" for i in range(300)]}),
    "other letters": record(**{"naïve": {"enum": ["é", "中文", "😀 a"]}, "with \"quotes\"": WHOLE}),
    "a config": record(("debug",), debug=TRUTH, retries={"type": "integer", "minimum": 0, "maximum": 9},
                       hosts=some({"type": "string", "pattern": r"^[a-z]{1,8}\.local$"}, 1, 2),
                       level={"enum": ["info", "warn", "error"]}),
}  # fmt: skip
