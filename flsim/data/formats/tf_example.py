"""Decoder of tf.Example, TensorFlow's record of named features, without TensorFlow.

The messages are those of tensorflow/core/example/{example,feature}.proto. They are built here in a pool of their own,
so that they do not conflict with an installed TensorFlow.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto


def _field(
    message: Any, name: str, number: int, kind: Any, message_type: str = "", repeated: bool = False, oneof: bool = False
) -> None:
    field = message.field.add(name=name, number=number, type=kind)
    field.label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
    if message_type:
        field.type_name = f".tensorflow.{message_type}"
    if oneof:
        field.oneof_index = 0


def _messages() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tensorflow", syntax="proto3")
    lists = (("BytesList", _Field.TYPE_BYTES), ("FloatList", _Field.TYPE_FLOAT), ("Int64List", _Field.TYPE_INT64))
    for name, kind in lists:
        _field(file.message_type.add(name=name), "value", 1, kind, repeated=True)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, _) in enumerate(lists, start=1):
        _field(feature, f"{name[:-4].lower()}_list", number, _Field.TYPE_MESSAGE, name, oneof=True)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    _field(entry, "key", 1, _Field.TYPE_STRING)
    _field(entry, "value", 2, _Field.TYPE_MESSAGE, "Feature")
    _field(features, "feature", 1, _Field.TYPE_MESSAGE, "Features.FeatureEntry", repeated=True)
    _field(file.message_type.add(name="Example"), "features", 1, _Field.TYPE_MESSAGE, "Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


Example: Any = _messages()
"""The message class: `Example.FromString(bytes).features.feature["tokens"].bytes_list.value[0]`."""
