// A fixed amount of work for a compiler, by which times on different machines, or on different days, are compared.
#include <map>
#include <regex>
#include <string>

template <int N>
std::string f(const std::string& s) {
  std::map<std::string, int> m;
  std::regex r("(a+)(b*)" + std::to_string(N));
  for (std::sregex_iterator i(s.begin(), s.end(), r), end; i != end; ++i) m[i->str()] += N + f<N - 1>(s).size();
  return m.empty() ? s : m.begin()->first;
}

template <>
std::string f<0>(const std::string& s) {
  return s;
}

std::string all(const std::string& s) { return f<6>(s); }
