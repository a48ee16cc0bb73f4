"""GGUF files with metadata and without tensors."""

from gguf import GGUFWriter

from toolkit.gguf_files import read_gguf


def file_of(metadata, path):
    """Writes the metadata to a file without tensors, and opens it."""
    writer = GGUFWriter(path, "llama")
    for key, value in metadata.items():
        kinds = {
            list: writer.add_array,
            bool: writer.add_bool,
            int: writer.add_uint32,
            str: writer.add_string,
        }
        kinds[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(path)
