/* Gloo, inside jaxlib, greets on standard output whenever replicas meet in a new group, and nothing turns
 * that off. libstdc++ is shared, so its std::cout is everybody's: a filter stands before the buffer it had.
 *
 * Source: gloo/transport/context.cc, Context::connectFullMesh's "[Gloo] Rank " and so on, piece by piece.
 */
#include <iostream>
#include <streambuf>
#include <string_view>

namespace {

constexpr std::string_view GREETING = "[Gloo] Rank ";

enum class Line { begins, is_passed_on, is_dropped };

/* One for each thread: gloo's pieces come between those of others, who may well be gloo too. */
thread_local Line line = Line::begins;

class WithoutGreetings : public std::streambuf {
 public:
  explicit WithoutGreetings(std::streambuf *next) : next_(next) {}

 protected:
  /* Looks at beginnings only: a piece that begins otherwise goes on in one piece, so that it stays one. */
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

/* Drops gloo's greetings from now on. Once in a process, and for ever: std::cout is flushed at its very end. */
extern "C" void polyxla_drop_greetings(void) {
  [[maybe_unused]] static std::streambuf *const before =
      std::cout.rdbuf(new WithoutGreetings(std::cout.rdbuf()));
}
