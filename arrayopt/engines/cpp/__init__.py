"""The engine `cpp`, which compiles plans as C++."""
