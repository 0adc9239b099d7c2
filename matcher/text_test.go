// SPDX-License-Identifier: Apache-2.0

package matcher_test

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/xspin/xspin/matcher"
)

func TestParseRuleset(t *testing.T) {
	eth := matcher.Rule{3, 0xffff0000, 0x08000000, 0x08000000}
	port := matcher.Rule{9, 0xffff0000, 0x1b580000, 0x1b590000}
	named := func(rs matcher.Ruleset) matcher.Ruleset { rs.Name = "x"; return rs }
	for _, tt := range []struct {
		text  string
		want  matcher.Ruleset
		print string // empty: the text itself
	}{
		{"x: 3&0xffff0000=0x08000000", matcher.Ruleset{Rules: []matcher.Rule{eth}}, ""},
		{"x:3&4294901760=134217728", matcher.Ruleset{Rules: []matcher.Rule{eth}}, "x: 3&0xffff0000=0x08000000"},
		{"\t x : 3 & 0XFFFF0000\t= 0x8000000 ", matcher.Ruleset{Rules: []matcher.Rule{eth}}, "x: 3&0xffff0000=0x08000000"},
		{"x: 3&0xffff0000=0x08000000 && 9&0xffff0000=0x1b580000:0x1b590000", matcher.Ruleset{Rules: []matcher.Rule{eth, port}}, ""},
		{"x: 3&0xffff0000=0x08000000||9&0xffff0000=0x1b580000:0x1b590000",
			matcher.Ruleset{Mode: matcher.Or, Rules: []matcher.Rule{eth, port}},
			"x: 3&0xffff0000=0x08000000 || 9&0xffff0000=0x1b580000:0x1b590000"},
		{"x: || 3&0xffff0000=0x08000000", matcher.Ruleset{Mode: matcher.Or, Rules: []matcher.Rule{eth}}, ""},
		{"x: && 3&0xffff0000=0x08000000", matcher.Ruleset{Rules: []matcher.Rule{eth}}, "x: 3&0xffff0000=0x08000000"},
		{"x: 127=0x00000000:0xffffffff", matcher.Ruleset{Rules: []matcher.Rule{{127, 0xffffffff, 0, 0xffffffff}}}, ""},
		{"x: true && false", matcher.Ruleset{Rules: []matcher.Rule{matcher.Empty, matcher.False}}, ""},
		{"x: 0&0=1:0", matcher.Ruleset{Rules: []matcher.Rule{matcher.False}}, "x: false"},
		{"x: all; eom true", matcher.Ruleset{EOM: &matcher.Empty}, ""},
		{"x: none; eom false", matcher.Ruleset{Mode: matcher.Or, EOM: &matcher.False}, ""},
		{"x: 3&0xffff0000=0x08000000; format flow; eom 9&0xffff0000=0x1b580000:0x1b590000",
			matcher.Ruleset{Rules: []matcher.Rule{eth}, EOM: &port, Format: "flow"},
			"x: 3&0xffff0000=0x08000000; eom 9&0xffff0000=0x1b580000:0x1b590000; format flow"},
		{"x: bypass", named(matcher.Bypass()), "x: none"},
		{"x: match-all", named(matcher.MatchAll()), "x: all; eom true"},
		{"x: udp", named(matcher.UDP()), named(matcher.UDP()).String()},
		{"x: udp(7000)", named(matcher.UDPPort(7000)), named(matcher.UDPPort(7000)).String()},
		{"x: udp ( 0 )", named(matcher.UDPPort(0)), named(matcher.UDPPort(0)).String()},
		{"x: tcp(65535)", named(matcher.TCPPort(65535)), named(matcher.TCPPort(65535)).String()},
		{"x: icmp-echo", named(matcher.ICMPEcho()), named(matcher.ICMPEcho()).String()},
		{"x: slmp", named(matcher.SLMP()), named(matcher.SLMP()).String()},
		{"x: slmp6", named(matcher.SLMP6()), named(matcher.SLMP6()).String()},
		{"x: slmp; eom false", func() matcher.Ruleset { rs := named(matcher.SLMP()); rs.EOM = &matcher.False; return rs }(),
			"x: 3&0xffffff00=0x08004500 && 5&0x3fff00ff=0x00000011 && 9&0xffff0000=0x24720000; eom false; format slmp; dst local"},
		{"x: slmp; dst any", func() matcher.Ruleset { rs := named(matcher.SLMP()); rs.Local = false; return rs }(),
			"x: 3&0xffffff00=0x08004500 && 5&0x3fff00ff=0x00000011 && 9&0xffff0000=0x24720000; eom 10&0x00008000=0x00008000; format slmp"},
		{"x: all; dst local", matcher.Ruleset{Local: true}, ""},
	} {
		t.Run(tt.text, func(t *testing.T) {
			tt.want.Name = "x"
			got, err := matcher.ParseRuleset(tt.text)
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, tt.want) {
				t.Fatalf("got  %#v\nwant %#v", got, tt.want)
			}
			if tt.print == "" {
				tt.print = tt.text
			}
			if s := got.String(); s != tt.print {
				t.Errorf("prints as %s\nwant      %s", s, tt.print)
			}
		})
	}
}

// A caret under the text says where the error is, and the last line what it
// says.
func TestParseRulesetErrors(t *testing.T) {
	for _, tt := range []string{`
x: 3&0xffff0000=0x0800
                ^
value 0x00000800 has bits 0x00000800 outside mask 0xffff0000`, `
x: 3&0xff00=1:2
            ^
no word under mask 0x0000ff00 lies in 0x00000001:0x00000002`, `
x: 128=1
   ^
word 128 is out of range`, `
x: 4294967295=1
   ^
out of range`, `
x: 3=0x100000000
     ^
a value 0x100000000 does not fit in 32 bits`, `
x: 3&4294967296=1
     ^
a mask 4294967296 does not fit in 32 bits`, `
x: 3=2:99999999999999999999
       ^
does not fit in 32 bits`, `
x: 3=2:1
     ^
start 0x00000002 is greater than end 0x00000001`, `
x: 3=0xg
     ^
"0xg" is not a number`, `
x: 3=0x
     ^
without leading zeros`, `
x: 3=010
     ^
without leading zeros`, `
x: 3=-1
     ^
"-1" is not a number`, `
x: 3=
     ^
expected a value, found the end`, `
x: 3&=1
     ^
expected a mask, found '='`, `
x: 3&&4=1
    ^
expected "=", found '&'`, `
x: 3=1 && 
          ^
expected a word index, found the end`, `
x: 3=1 && 4=1 || 5=1
              ^
&& and || in one ruleset`, `
x: || 3=1 && 4=1
          ^
|| and && in one ruleset`, `
x: 1=1&&2=1&&3=1&&4=1&&5=1&&6=1&&7=1&&8=1&&9=1
                                           ^
this is rule 9: want at most 8 in a ruleset`, `
x: 1=1 2=1
       ^
expected the end, found '2'`, `
x: 1=1; eom 3=1; eom 4=1
                 ^
eom is given twice`, `
x: 1=1; end 3=1
        ^
expected "eom RULE", "format NAME", "dst local" or "dst any", found 'e'`, `
x: 1=1;
       ^
expected "eom RULE", "format NAME", "dst local" or "dst any", found the end`, `
x: 1=1; dst 10.0.0.1
            ^
expected "local" or "any", found '1'`, `
x: 1=1; dst any; dst local
                 ^
dst is given twice`, `
x: 1=1; eom 200=1
            ^
word 200 is out of range`, `
x: 1=1; format slpm
               ^
no message format "slpm": want packet, flow, slmp, slmp6`, `
x: udp(65536)
   ^
port "65536": want a decimal number, 0 to 65535`, `
x: udp(
       ^
expected ")", found the end`, `
x: tcp
   ^
tcp needs a port: tcp(PORT)`, `
x: slmp(9330)
   ^
slmp takes no argument`, `
x: sctp(1)
   ^
no predefined ruleset "sctp": want bypass, match-all, udp`, `
x: udp && 1=1
       ^
expected the end, found '&'`, `
x: all && 1=1
       ^
expected the end, found '&'`, `
x y: 1=1
  ^
expected ":" after the name, as in "m: slmp", found 'y'`, `
: 1=1
^
the name is missing`, `
x: é
   ^
expected a word index, found 'é'`,
	} {
		part := strings.SplitN(tt[1:], "\n", 3)
		t.Run(part[0], func(t *testing.T) {
			_, err := matcher.ParseRuleset(part[0])
			var pe *matcher.ParseError
			if !errors.As(err, &pe) {
				t.Fatalf("error is %v", err)
			}
			if got := pe.Detail(); got != part[0]+"\n"+part[1] {
				t.Errorf("points at\n%s\nwant\n%s", got, part[0]+"\n"+part[1])
			}
			if want := len(part[1]); pe.Column != want {
				t.Errorf("column is %d, want %d", pe.Column, want)
			}
			if !strings.Contains(pe.Msg, part[2]) {
				t.Errorf("says %q, want %q", pe.Msg, part[2])
			}
		})
	}
}

func TestTheCaretStandsBelowTabsAndWideCharacters(t *testing.T) {
	_, err := matcher.ParseFile("f", strings.NewReader("x:\t1=1\t?\n"))
	var pe *matcher.ParseError
	if !errors.As(err, &pe) || pe.Detail() != "x:\t1=1\t?\n  \t   \t^" {
		t.Fatalf("detail is %q", pe.Detail())
	}
}

func TestParseRule(t *testing.T) {
	if r, err := matcher.ParseRule(" 3 & 0xff = 1 : 2 "); err != nil || r != (matcher.Rule{3, 0xff, 1, 2}) {
		t.Errorf("%v %v", r, err)
	}
	if _, err := matcher.ParseRule("3=1 && 4=1"); err == nil || err.Error() != `1:5: expected the end, found '&'` {
		t.Error(err)
	}
}

const rulesFile = `# what this file is for

web:   tcp(80); format flow   # a comment; eom nonsense
ping:  icmp-echo
 last: all
`

func TestParseFile(t *testing.T) {
	for _, newline := range []string{"\n", "\r\n"} {
		all, err := matcher.ParseFile("f", strings.NewReader(strings.ReplaceAll(rulesFile, "\n", newline)))
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, rs := range all {
			names = append(names, rs.Name)
		}
		if fmt.Sprint(names) != "[web ping last]" || all[0].Format != "flow" || all[0].EOM != nil {
			t.Errorf("read %v", all)
		}
	}
}

func TestParseFileReportsEveryBadLine(t *testing.T) {
	all, err := matcher.ParseFile("my.rules", strings.NewReader("a: 1=1\nb: 1=\n\nc: 2&1=2 # why not\n a: udp\nd: all\n"))
	if err == nil || all != nil {
		t.Fatalf("got %v, %v", all, err)
	}
	want := `my.rules:2:6: expected a value, found the end
my.rules:4:8: value 0x00000002 has bits 0x00000002 outside mask 0x00000001, so it can never be equal
my.rules:5:2: ruleset a is already defined on line 1`
	if err.Error() != want {
		t.Errorf("got\n%s\nwant\n%s", err, want)
	}
	var pe *matcher.ParseError
	if !errors.As(errors.Join(err.(interface{ Unwrap() []error }).Unwrap()[1]), &pe) || pe.Text != "c: 2&1=2 # why not" {
		t.Errorf("the line of the second error is %q", pe.Text)
	}
}

func TestParseFileLimits(t *testing.T) {
	var b strings.Builder
	for i := range matcher.MaxRulesets {
		fmt.Fprintf(&b, "r%d: udp\n", i)
	}
	if _, err := matcher.ParseFile("f", strings.NewReader(b.String())); err != nil {
		t.Errorf("256 rulesets: %v", err)
	}
	b.WriteString("  r256: udp\n")
	if _, err := matcher.ParseFile("f", strings.NewReader(b.String())); err == nil ||
		err.Error() != "f:257:3: ruleset r256 is number 257 of the file: want at most 256" {
		t.Errorf("257 rulesets: %v", err)
	}
	long := "a: udp\n#" + strings.Repeat("x", 5000) + "\nb: udp\n"
	if _, err := matcher.ParseFile("f", strings.NewReader(long)); err == nil || !strings.HasPrefix(err.Error(), "f:2:4096: the line is longer") {
		t.Errorf("a long line: %v", err)
	}
	broken := errors.New("broken")
	if _, err := matcher.ParseFile("f", failing{broken}); !errors.Is(err, broken) {
		t.Errorf("a failing reader: %v", err)
	}
}

func TestParseFileOfSomethingElse(t *testing.T) {
	for _, magic := range []string{"\xa1\xb2\xc3\xd4", "\xd4\xc3\xb2\xa1", "\xa1\xb2<M", "M<\xb2\xa1", "\n\r\r\n"} {
		_, err := matcher.ParseFile("f", strings.NewReader(magic+strings.Repeat("\x00\x01\x02\n", 300)))
		if err == nil || err.Error() != "f:1:1: this is a packet capture, not rules: `xspin rules test --pcap` reads those" {
			t.Errorf("%q: %v", magic, err)
		}
	}
	for text, want := range map[string]string{
		"a: udp\nb: \x00\nc\n":              "f:2:4: this is not UTF-8 text; what follows is not read",
		"a: udp\nx\nb: udp # \xff\nc\n":     "f:2:2: expected \":\" after the name, as in \"m: slmp\", found the end\nf:3:10: this is not UTF-8 text; what follows is not read",
		"a: udp\nb: 1=\x1b[2J\u202e # \xe4": "f:2:16: this is not UTF-8 text; what follows is not read",
	} {
		_, err := matcher.ParseFile("f", strings.NewReader(text))
		if err == nil {
			t.Errorf("%q is accepted", text)
		} else if err.Error() != want {
			t.Errorf("%q:\n%v\nwant\n%s", text, err, want)
		}
	}
	_, err := matcher.ParseFile("f", strings.NewReader(strings.Repeat("x\n", 30)))
	if err == nil || strings.Count(err.Error(), "\n") != 9 || !strings.HasSuffix(err.Error(), "\nf:10:2: expected \":\" after the name, as in \"m: slmp\", found the end (the 10th error: what follows is not read)") {
		t.Errorf("30 errors:\n%v", err)
	}
	if _, err := matcher.ParseFile("f", strings.NewReader("a: udp # \ufffd, é\n")); err != nil {
		t.Error(err)
	}
	_, err = matcher.ParseFile("f", strings.NewReader("b: \t1=\x1b[2J\u009bé\n"))
	var pe *matcher.ParseError
	if !errors.As(err, &pe) || pe.Detail() != "b: \t1=\ufffd[2J\ufffdé\n   \t  ^" {
		t.Errorf("%v: %q", err, pe.Detail())
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"x: 3&0xffff0000=0x08000000 && 9&0xffff0000=0x1b580000:0x1b590000; eom 10&0x8000=0x8000; format slmp",
		"a-b.c_9: || 127=0:4294967295", "x: true || false", "x: all; eom true", "x: none", "x: udp(7000)", "x: slmp",
		"x: 0&0=1:0", "x: 3&0xff00=1:256", "x: 0&0=0:7", "x: 1=1 && 2=2 || 3=3", ": ; = & : 0x",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		rs, err := matcher.ParseRuleset(s)
		if err != nil {
			var pe *matcher.ParseError
			if !errors.As(err, &pe) || pe.Line != 1 || pe.Column < 1 || pe.Column > len(s)+1 || pe.Msg == "" {
				t.Fatalf("bad error %#v", err)
			}
			pe.Detail()
			return
		}
		if err := rs.Validate(); err != nil {
			t.Fatalf("parsed, but %v", err)
		}
		print := rs.String()
		again, err := matcher.ParseRuleset(print)
		if err != nil {
			t.Fatalf("%q prints as %q: %v", s, print, err)
		}
		if !reflect.DeepEqual(again, rs) {
			t.Fatalf("%q prints as %q, which reads as %#v, not %#v", s, print, again, rs)
		}
		if matcher.Explain(&rs) == "" {
			t.Fatal("no explanation")
		}
		tab := matcher.Table{Entries: map[int]matcher.Entry{0: {Ruleset: rs, Format: matcher.FormatByName("packet")}}}
		if _, err := matcher.Compile(&tab); err != nil {
			t.Fatal(err)
		}
	})
}
