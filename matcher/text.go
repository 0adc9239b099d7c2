// SPDX-License-Identifier: Apache-2.0

package matcher

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// The text form, in the spirit of iptables' u32 match. One ruleset a line, "#"
// starts a comment, spaces are free between tokens:
//
//	line    = [ ruleset ] [ "#" anything ]
//	ruleset = NAME ":" body { ";" ( "eom" rule | "format" NAME | "dst" ( "local" | "any" ) ) }
//	body    = "all" | "none" | predefined
//	        | [ "&&" ] rule { "&&" rule }
//	        | [ "||" ] rule { "||" rule }
//	rule    = "true" | "false" | INDEX [ "&" MASK ] "=" VALUE [ ":" VALUE ]
//
// Numbers are decimal or 0x hexadecimal. "all" is And of no rules, "none" is Or
// of no rules; "true" is the rule Empty, "false" the rule False. A leading "||"
// makes a single rule an Or ruleset. predefined is one of bypass, match-all, udp,
// udp(PORT), tcp(PORT), icmp-echo, slmp and slmp6; clauses after it replace its own.
// "dst local" sets Ruleset.Local, "dst any" clears it.

// maxLine is the longest line of a rules file in bytes. Eight rules take 300.
const maxLine = 4096

// maxErrors is how many errors end the reading of a file.
const maxErrors = 10

// isCapture reports whether a file starts like pcap or pcapng, in any byte order.
func isCapture(head []byte) bool {
	for _, magic := range []string{"\xa1\xb2\xc3\xd4", "\xd4\xc3\xb2\xa1", "\xa1\xb2\x3c\x4d", "\x4d\x3c\xb2\xa1", "\x0a\x0d\x0d\x0a"} {
		if string(head) == magic {
			return true
		}
	}
	return false
}

// notText returns the column of the first byte of a line that is not UTF-8 text, 0 if
// there is none.
func notText(s string) (column int) {
	for i, r := range s {
		if r == 0 || r == utf8.RuneError && !strings.HasPrefix(s[i:], string(utf8.RuneError)) {
			return i + 1
		}
	}
	return 0
}

// ParseError is an error in the text form of a rule or ruleset.
type ParseError struct {
	File   string // empty if the text is not from a file
	Line   int    // 1-based
	Column int    // 1-based, in bytes
	Msg    string
	Text   string // the whole line
}

// Error returns file:line:column and the message on one line.
func (e *ParseError) Error() string {
	if e.File == "" {
		return fmt.Sprintf("%d:%d: %s", e.Line, e.Column, e.Msg)
	}
	return fmt.Sprintf("%s:%d:%d: %s", e.File, e.Line, e.Column, e.Msg)
}

// Detail returns the line and, below it, a caret at the column. Characters that do not
// print are shown as replacement characters.
func (e *ParseError) Detail() string {
	text := strings.Map(func(r rune) rune {
		if r != '\t' && !unicode.IsPrint(r) {
			return utf8.RuneError
		}
		return r
	}, e.Text)
	var pad strings.Builder
	for i, r := range e.Text {
		if i >= e.Column-1 {
			break
		}
		if r == '\t' {
			pad.WriteByte('\t') // as wide as the tab above
		} else {
			pad.WriteByte(' ')
		}
	}
	return text + "\n" + pad.String() + "^"
}

// ParseRule parses one rule, such as "3&0xffff0000=0x08000000". The error is a
// *ParseError.
func ParseRule(s string) (Rule, error) {
	p := parser{text: s}
	r := p.rule()
	p.end()
	if p.err != nil {
		return Rule{}, p.err
	}
	return r, nil
}

// ParseRuleset parses one ruleset, such as "web: tcp(80); format flow". The
// error is a *ParseError.
func ParseRuleset(s string) (Ruleset, error) {
	p := parser{text: s}
	rs := p.ruleset()
	p.end()
	if p.err != nil {
		return Ruleset{}, p.err
	}
	return rs, nil
}

// ParseFile parses a rules file. The position of a ruleset in the result is its
// number in a table. The name is only for errors. If lines are wrong, it returns no
// ruleset, and the error joins a *ParseError for each of the first ten. For a capture,
// and after bytes that are not text, nothing more is read.
func ParseFile(name string, r io.Reader) ([]Ruleset, error) {
	var all []Ruleset
	var errs []error
	lineOf := make(map[string]int)

	input := bufio.NewReader(r)
	if head, _ := input.Peek(4); isCapture(head) {
		return nil, &ParseError{File: name, Line: 1, Column: 1, Msg: "this is a packet capture, not rules: `xspin rules test --pcap` reads those"}
	}
	s := bufio.NewScanner(input)
	s.Buffer(nil, maxLine)
	line := 0
	for len(errs) < maxErrors && s.Scan() {
		line++
		if column := notText(s.Text()); column > 0 {
			errs = append(errs, &ParseError{File: name, Line: line, Column: column, Msg: "this is not UTF-8 text; what follows is not read", Text: s.Text()})
			break
		}
		text, _, _ := strings.Cut(s.Text(), "#")
		if strings.TrimSpace(text) == "" {
			continue
		}
		p := parser{text: text}
		rs := p.ruleset()
		p.end()
		if p.err == nil {
			start := strings.Index(text, rs.Name)
			if first, ok := lineOf[rs.Name]; ok {
				p.fail(start, "ruleset %s is already defined on line %d", rs.Name, first)
			} else if len(lineOf) == MaxRulesets {
				p.fail(start, "ruleset %s is number %d of the file: want at most %d", rs.Name, len(lineOf)+1, MaxRulesets)
			}
		}
		if p.err != nil {
			p.err.File, p.err.Line, p.err.Text = name, line, s.Text()
			if errs = append(errs, p.err); len(errs) == maxErrors {
				p.err.Msg += fmt.Sprintf(" (the %dth error: what follows is not read)", maxErrors)
			}
			continue
		}
		lineOf[rs.Name] = line
		all = append(all, rs)
	}
	switch err := s.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		errs = append(errs, &ParseError{File: name, Line: line + 1, Column: maxLine,
			Msg: fmt.Sprintf("the line is longer than %d bytes; what follows is not read", maxLine)})
	case err != nil:
		errs = append(errs, fmt.Errorf("read %s: %w", name, err))
	}
	if errs != nil {
		return nil, errors.Join(errs...)
	}
	return all, nil
}

// String returns the rule in its text form, which ParseRule reads back to the
// same value.
func (r Rule) String() string {
	switch r {
	case Empty:
		return "true"
	case False:
		return "false"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%d", r.Index)
	if r.Mask != 0xffffffff {
		fmt.Fprintf(&b, "&0x%08x", r.Mask)
	}
	fmt.Fprintf(&b, "=0x%08x", r.Start)
	if r.End != r.Start {
		fmt.Fprintf(&b, ":0x%08x", r.End)
	}
	return b.String()
}

// String returns the ruleset in its text form, which ParseRuleset reads back to
// the same value if the ruleset is valid.
func (rs Ruleset) String() string {
	var b strings.Builder
	b.WriteString(rs.Name + ": ")
	sep := map[Mode]string{And: " && ", Or: " || "}[rs.Mode]
	switch {
	case len(rs.Rules) == 0 && rs.Mode == And:
		b.WriteString("all")
	case len(rs.Rules) == 0:
		b.WriteString("none")
	case len(rs.Rules) == 1 && rs.Mode == Or:
		b.WriteString("|| ")
	}
	for i, r := range rs.Rules {
		if i > 0 {
			b.WriteString(sep)
		}
		b.WriteString(r.String())
	}
	if rs.EOM != nil {
		b.WriteString("; eom " + rs.EOM.String())
	}
	if rs.Format != "" {
		b.WriteString("; format " + rs.Format)
	}
	if rs.Local {
		b.WriteString("; dst local")
	}
	return b.String()
}

// parser reads one line from left to right. The first error sticks; what is read
// after it is meaningless.
type parser struct {
	text string
	pos  int
	err  *ParseError
}

// fail records an error at a byte position.
func (p *parser) fail(pos int, format string, args ...any) {
	if p.err == nil {
		p.err = &ParseError{Line: 1, Column: pos + 1, Msg: fmt.Sprintf(format, args...), Text: p.text}
	}
}

func (p *parser) space() {
	for p.pos < len(p.text) && (p.text[p.pos] == ' ' || p.text[p.pos] == '\t') {
		p.pos++
	}
}

// accept skips the token if it is next.
func (p *parser) accept(token string) bool {
	p.space()
	if !strings.HasPrefix(p.text[p.pos:], token) {
		return false
	}
	p.pos += len(token)
	return true
}

// expected fails at the next token, and says what was found instead.
func (p *parser) expected(what string) {
	p.space()
	if p.pos == len(p.text) {
		p.fail(p.pos, "expected %s, found the end", what)
		return
	}
	r, _ := utf8.DecodeRuneInString(p.text[p.pos:])
	p.fail(p.pos, "expected %s, found %q", what, r)
}

// end fails unless the whole text is read.
func (p *parser) end() {
	if p.space(); p.pos < len(p.text) {
		p.expected("the end")
	}
}

// word reads the longest run of name characters, possibly empty.
func (p *parser) word() (s string, pos int) {
	p.space()
	pos = p.pos
	for p.pos < len(p.text) && nameByte(p.text[p.pos]) {
		p.pos++
	}
	return p.text[pos:p.pos], pos
}

// number reads a decimal or hexadecimal number of 32 bits.
func (p *parser) number(what string) (v uint32, pos int) {
	s, pos := p.word()
	if s == "" {
		p.expected(what)
		return 0, pos
	}
	digits, base := s, 10
	if len(s) > 2 && (s[:2] == "0x" || s[:2] == "0X") {
		digits, base = s[2:], 16
	} else if len(s) > 1 && s[0] == '0' {
		p.fail(pos, "%s %q: write hexadecimal with 0x, and decimal without leading zeros", what, s)
		return 0, pos
	}
	n, err := strconv.ParseUint(digits, base, 32)
	switch {
	case errors.Is(err, strconv.ErrRange):
		p.fail(pos, "%s %s does not fit in 32 bits", what, s)
	case err != nil:
		p.fail(pos, "%s %q is not a number", what, s)
	}
	return uint32(n), pos
}

// keyword skips one of the words if it is next.
func (p *parser) keyword(words ...string) string {
	at := p.pos
	s, _ := p.word()
	for _, w := range words {
		if s == w {
			return w
		}
	}
	p.pos = at
	return ""
}

func (p *parser) rule() Rule {
	switch p.keyword("true", "false") {
	case "true":
		return Empty
	case "false":
		return False
	}
	index, at := p.number("a word index")
	if p.err != nil {
		return Rule{}
	}
	pos := map[part]int{partIndex: at}
	r := Rule{Index: int(min(index, 1<<31-1)), Mask: 0xffffffff}
	if p.space(); !strings.HasPrefix(p.text[p.pos:], "&&") && p.accept("&") {
		r.Mask, _ = p.number("a mask")
	}
	if !p.accept("=") {
		p.expected(`"="`)
		return r
	}
	r.Start, pos[partStart] = p.number("a value")
	r.End = r.Start
	if p.accept(":") {
		r.End, _ = p.number("the end of the range")
	}
	if part, msg := r.fault(); msg != "" {
		p.fail(pos[part], "%s", msg)
	}
	return r
}

func (p *parser) ruleset() Ruleset {
	name, at := p.word()
	if msg := badName(name); msg != "" {
		p.fail(at, "%s", msg)
		return Ruleset{}
	}
	if !p.accept(":") {
		p.expected(`":" after the name, as in "m: slmp"`)
		return Ruleset{}
	}
	rs := p.body()
	rs.Name = name
	seen := make(map[string]bool)
	for p.err == nil && p.accept(";") {
		p.space()
		at := p.pos
		clause := p.keyword("eom", "format", "dst")
		if seen[clause] {
			p.fail(at, "%s is given twice", clause)
		}
		seen[clause] = true
		switch clause {
		case "eom":
			eom := p.rule()
			rs.EOM = &eom
		case "format":
			rs.Format, at = p.word()
			if FormatByName(rs.Format) == nil {
				p.fail(at, "%s", unknownFormat(rs.Format))
			}
		case "dst":
			switch p.keyword("local", "any") {
			case "local":
				rs.Local = true
			case "any":
				rs.Local = false
			default:
				p.expected(`"local" or "any"`)
			}
		default:
			p.expected(`"eom RULE", "format NAME", "dst local" or "dst any"`)
		}
	}
	return rs
}

func (p *parser) body() Ruleset {
	rs := Ruleset{}
	switch p.keyword("all", "none") {
	case "all":
		return rs
	case "none":
		rs.Mode = Or
		return rs
	}
	at := p.pos
	if s, pos := p.word(); s != "" && s != "true" && s != "false" && (s[0] < '0' || s[0] > '9') {
		arg, hasArg := "", p.accept("(")
		if hasArg {
			if arg, _ = p.word(); !p.accept(")") {
				p.expected(`")"`)
				return rs
			}
		}
		predef, msg := lookupPredefined(s, arg, hasArg)
		if msg != "" {
			p.fail(pos, "%s", msg)
		}
		return predef
	}
	p.pos = at

	op := p.operator()
	for p.err == nil {
		p.space()
		at := p.pos
		r := p.rule()
		if len(rs.Rules) == MaxRules {
			p.fail(at, "this is rule %d: want at most %d in a ruleset", MaxRules+1, MaxRules)
		}
		rs.Rules = append(rs.Rules, r)
		p.space()
		at = p.pos
		next := p.operator()
		if next == "" {
			break
		}
		if op != "" && next != op {
			p.fail(at, "%s and %s in one ruleset: write one ruleset for each alternative", op, next)
		}
		op = next
	}
	if op == "||" {
		rs.Mode = Or
	}
	return rs
}

// operator reads "&&", "||" or nothing.
func (p *parser) operator() string {
	for _, op := range []string{"&&", "||"} {
		if p.accept(op) {
			return op
		}
	}
	return ""
}
