// The runtime as one text, which takes two thirds of the time to compile. The headers of C++ come first: ours define words
// that they use, such as __noinline__.
#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "checks.cpp"
#include "fibers.cpp"
#include "hooks.cpp"
#include "schedule.cpp"
#include "synchronise.cpp"
