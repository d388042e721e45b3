/* A filter for gloo's messages on standard output. Gloo, which jaxlib contains, prints one for each replica of
 * each new group, and has no option to turn them off. libstdc++ is shared by all libraries of the process, so a
 * filter can be put before the buffer of its std::cout.
 *
 * Source: gloo/transport/context.cc, Context::connectFullMesh's "[Gloo] Rank " and so on, piece by piece.
 */
#include <iostream>
#include <streambuf>
#include <string_view>

namespace {

constexpr std::string_view GREETING = "[Gloo] Rank ";

enum class Line { begins, is_passed_on, is_dropped };

/* Each thread has its own state, because threads write their lines in pieces, which are interleaved. */
thread_local Line line = Line::begins;

class WithoutGreetings : public std::streambuf {
 public:
  explicit WithoutGreetings(std::streambuf *next) : next_(next) {}

 protected:
  /* Only the beginning of a piece is checked, because gloo writes its prefix as a piece of its own. */
  std::streamsize xsputn(const char *data, std::streamsize size) override {
    std::string_view text(data, size);
    if (line == Line::begins && text.substr(0, GREETING.size()) == GREETING) line = Line::is_dropped;
    std::streamsize dropped = 0;
    if (line == Line::is_dropped) {
      size_t end = text.find('\n');
      if (end == text.npos) return size;
      line = Line::begins;
      dropped = end + 1;
    }
    if (dropped == size) return size;
    line = text.back() == '\n' ? Line::begins : Line::is_passed_on;
    return dropped + next_->sputn(data + dropped, size - dropped);
  }

  int_type overflow(int_type code) override {
    if (traits_type::eq_int_type(code, traits_type::eof())) return traits_type::not_eof(code);
    char one = traits_type::to_char_type(code);
    return xsputn(&one, 1) == 1 ? code : traits_type::eof();
  }

  int sync() override { return next_->pubsync(); }

 private:
  std::streambuf *next_;
};

}  // namespace

/* Installs the filter; a second call does nothing. It is never removed, because std::cout is flushed when the
 * process ends. */
extern "C" void polyxla_drop_greetings(void) {
  [[maybe_unused]] static std::streambuf *const before =
      std::cout.rdbuf(new WithoutGreetings(std::cout.rdbuf()));
}
