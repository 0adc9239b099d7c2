// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/xspin/xspin/internal/flags"
	"github.com/xspin/xspin/internal/pcapng"
	"github.com/xspin/xspin/internal/regular"
	"github.com/xspin/xspin/loader"
	"github.com/xspin/xspin/matcher"
)

// newRulesCmd returns `xspin rules`.
func newRulesCmd() *cobra.Command {
	rules := &cobra.Command{
		Use:   "rules",
		Short: "Check, explain and try rulesets",
		Long: `A rules file has one ruleset on each line:

  NAME: RULE && RULE ... [; eom RULE] [; format FORMAT] [; dst WHOSE]   all rules hold
  NAME: RULE || RULE ... [; eom RULE] [; format FORMAT] [; dst WHOSE]   any rule holds
  NAME: PREDEFINED       [; eom RULE] [; format FORMAT] [; dst WHOSE]

A rule is INDEX&MASK=VALUE or INDEX&MASK=START:END. It holds if word INDEX of the
frame, masked with MASK, is VALUE, or lies in the range. Words have 32 bits, are
big-endian, and are counted from 0 at the Ethernet header. A # starts a comment.
PREDEFINED is bypass, match-all, udp, udp(PORT), tcp(PORT), icmp-echo, slmp or
slmp6; FORMAT is packet, flow, slmp or slmp6. The first ruleset that matches a
frame gets it.

WHOSE is local, for frames to the interface's own MAC and, if they are IP packets, to
one of its addresses; or any. By default, predefined rulesets are local, except bypass
and match-all; all others are not. Frames that a local ruleset leaves out go on to the
next ruleset, or to Linux.`,
		Args: cobra.NoArgs,
	}
	rules.AddCommand(newRulesCheckCmd(), newRulesExplainCmd(), newRulesTestCmd())
	return rules
}

// fileCheck is what `rules check` says about a file.
type fileCheck struct {
	File     string      `json:"file"`
	OK       bool        `json:"ok"`
	Rulesets int         `json:"rulesets"`
	Errors   []fileError `json:"errors"`
}

// A fileError without a line is about the whole file.
type fileError struct {
	Line    int    `json:"line,omitempty"`   // from 1
	Column  int    `json:"column,omitempty"` // from 1, in bytes
	Message string `json:"message"`
}

func newRulesCheckCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "check FILE...",
		Short: "Check rules files (- is standard input)",
		Example: `  xspin rules check my.rules
  xspin rules check --json *.rules`,
		Args: wantArgs("FILE..."),
		RunE: func(cmd *cobra.Command, args []string) error {
			bad := 0
			files := []fileCheck{}
			for _, path := range args {
				rs, errs := parseRules(cmd, path)
				if len(errs) > 0 {
					bad++
				}
				switch {
				case asJSON:
					files = append(files, checked(path, len(rs), errs))
				case len(errs) > 0:
					fmt.Fprintln(cmd.ErrOrStderr(), complain(cmd, path, errs))
				default:
					fmt.Fprintf(cmd.OutOrStdout(), "%s: %s\n", path, count(len(rs), "ruleset"))
				}
			}
			if asJSON {
				if err := writeJSON(cmd.OutOrStdout(), struct {
					Schema int         `json:"schema"`
					Files  []fileCheck `json:"files"`
				}{1, files}); err != nil {
					return fmt.Errorf("rules check: %w", err)
				}
			}
			if bad > 0 {
				return fmt.Errorf("rules check: %d of %s not valid", bad, count(len(args), "file"))
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document, with the errors")
	return cmd
}

func checked(path string, rulesets int, errs []error) fileCheck {
	f := fileCheck{File: path, OK: len(errs) == 0, Rulesets: rulesets, Errors: []fileError{}}
	for _, err := range errs {
		e := fileError{Message: err.Error()}
		if pe := (*matcher.ParseError)(nil); errors.As(err, &pe) {
			e = fileError{pe.Line, pe.Column, pe.Msg}
		}
		f.Errors = append(f.Errors, e)
	}
	return f
}

// rulesetWords is what `rules explain` says about a ruleset.
type rulesetWords struct {
	Number int    `json:"number"` // from 0, in the order of matching
	Name   string `json:"name"`
	Text   string `json:"text"`
	Words  string `json:"words"`
}

func newRulesExplainCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "explain FILE [NAME]",
		Short: "Explain what rulesets match",
		Example: `  xspin rules explain my.rules web
  xspin rules explain --json my.rules`,
		Args: wantArgs("FILE", "[NAME]"),
		RunE: func(cmd *cobra.Command, args []string) error {
			all, err := readRules(cmd, args[0])
			if err != nil {
				return fmt.Errorf("rules explain: %w", err)
			}
			found := []rulesetWords{}
			var names []string
			for i, rs := range all {
				names = append(names, rs.Name)
				if len(args) == 1 || rs.Name == args[1] {
					found = append(found, rulesetWords{i, rs.Name, rs.String(), matcher.Explain(&rs)})
				}
			}
			if len(args) == 2 && len(found) == 0 {
				return fmt.Errorf("rules explain: no ruleset %q in %s: want %s", args[1], args[0], strings.Join(names, ", "))
			}
			if asJSON {
				return writeJSON(cmd.OutOrStdout(), struct {
					Schema   int            `json:"schema"`
					Rulesets []rulesetWords `json:"rulesets"`
				}{1, found})
			}
			for i, rs := range found {
				if i > 0 {
					fmt.Fprintln(cmd.OutOrStdout())
				}
				fmt.Fprintf(cmd.OutOrStdout(), "%d %s\n  %s\n", rs.Number, rs.Text, rs.Words)
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document")
	return cmd
}

// writeJSON prints a document. Rules are full of & and <, which stay as they are.
func writeJSON(w io.Writer, doc any) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(doc)
}

// verdictEngine matches frames one by one.
type verdictEngine interface {
	Verdict(frame []byte) (matcher.Verdict, error)
	Close() error
}

// reference is the matcher in Go: slow, but it needs no privileges.
type reference struct{ table *matcher.Table }

func (r reference) Verdict(frame []byte) (matcher.Verdict, error) { return r.table.Match(frame), nil }
func (r reference) Close() error                                  { return nil }

// newKernelEngine makes the engine that runs the XDP program itself. Tests replace it.
var newKernelEngine = func(t *matcher.Table) (verdictEngine, error) { return loader.NewTester(t) }

// engines are what --engine takes.
var engines = []string{"reference", "kernel", "auto"}

// newEngine returns an engine and its name. "auto" is the kernel for root if that works,
// and otherwise the reference.
func newEngine(name string, root bool, t *matcher.Table, warn io.Writer) (verdictEngine, string, error) {
	switch name {
	case "reference":
	case "kernel":
		e, err := newKernelEngine(t)
		if err != nil {
			return nil, "", fmt.Errorf("engine kernel: %w; try --engine reference", err)
		}
		return e, "kernel", nil
	case "auto":
		if !root {
			break
		}
		e, err := newKernelEngine(t)
		if err == nil {
			return e, "kernel", nil
		}
		fmt.Fprintf(warn, "warning: using the reference matcher, because the in-kernel program cannot be used: %v\n", err)
	default:
		return nil, "", fmt.Errorf("no engine %q: want one of %s", name, strings.Join(engines, ", "))
	}
	return reference{t}, "reference", nil
}

// frameVerdict is what `rules test` says about a frame. Fields that mean
// nothing for the verdict are left out.
type frameVerdict struct {
	Number   int      `json:"number"`   // from 1, as Wireshark counts
	Length   int      `json:"length"`   // bytes on the wire
	Captured int      `json:"captured"` // bytes in the file; the verdict is about these
	Verdict  string   `json:"verdict"`  // pass, malformed, deliver, error
	Ruleset  *string  `json:"ruleset,omitempty"`
	Context  *uint16  `json:"context,omitempty"`
	EOM      *bool    `json:"eom,omitempty"`
	Key      []uint32 `json:"key,omitempty"`
	Offset   *uint32  `json:"offset,omitempty"`
	Error    string   `json:"error,omitempty"`
}

func newRulesTestCmd() *cobra.Command {
	var path, engine string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "test --pcap CAPTURE FILE",
		Short: "Show what would happen to each frame of a capture",
		Long: `Run the rulesets of a file over an Ethernet capture (pcap or pcapng), and print
one verdict per frame: pass (to the Linux stack), malformed (matched, but lacks
what its message format names: counted, to the Linux stack) or deliver. A ruleset
without a format is tried with format packet, and its number is its context.

The reference engine is the matcher in Go. The kernel engine is the XDP program
itself, run frame by frame and attached to nothing; it needs root. Neither knows
the addresses of the captured host: "dst local" holds for all frames.`,
		Example: `  xspin rules test --pcap trace.pcapng my.rules
  sudo xspin rules test --engine kernel --json --pcap trace.pcap my.rules`,
		Args: wantArgs("FILE"),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			all, err := readRules(cmd, args[0])
			if err != nil {
				return fmt.Errorf("rules test: %w", err)
			}
			c, closeFile, err := openCapture(cmd, path)
			if err != nil {
				return fmt.Errorf("rules test: %w", err)
			}
			defer closeFile()
			eng, name, err := newEngine(engine, os.Geteuid() == 0, rulesTable(all), cmd.ErrOrStderr())
			if err != nil {
				return fmt.Errorf("rules test: %w", err)
			}
			defer func() {
				if cerr := eng.Close(); err == nil && cerr != nil {
					err = fmt.Errorf("rules test: close engine %s: %w", name, cerr)
				}
			}()

			out := bufio.NewWriter(cmd.OutOrStdout())
			var report report
			if asJSON {
				report = newJSONReport(out, name)
			} else {
				report = newTextReport(out, all, name)
			}
			err = testFrames(c, eng, all, cmd.ErrOrStderr(), report.frame)
			// Show what was read before an error, too.
			if err = errors.Join(err, report.end(), out.Flush()); err != nil {
				return fmt.Errorf("rules test: %s: %w", path, err)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&path, "pcap", "", "capture to read, pcap or pcapng, or - for standard input (required)")
	cmd.Flags().StringVar(&engine, "engine", "auto", "reference, kernel, or auto: kernel for root")
	flags.OneOf(cmd.Flags(), "engine", engines)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document")
	_ = cmd.MarkFlagRequired("pcap") // fails only for a flag that does not exist
	return cmd
}

// openCapture opens a capture, or standard input for "-". Errors name the path.
func openCapture(cmd *cobra.Command, path string) (c *pcapng.Reader, end func(), err error) {
	in, end := cmd.InOrStdin(), func() {}
	if path != "-" {
		f, err := regular.Open(path)
		if err != nil {
			return nil, nil, err
		}
		in, end = f, func() { f.Close() }
	}
	if c, err = pcapng.NewReader(in); err != nil {
		end()
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	return c, end, nil
}

// tellSkipped says how many frames of a capture were left out.
func tellSkipped(warn io.Writer, c *pcapng.Reader) {
	if n := c.Skipped(); n > 0 {
		fmt.Fprintf(warn, "warning: %s skipped: not Ethernet\n", count(n, "frame"))
	}
}

// testFrames gives each frame of the capture to the engine. A frame that the
// engine cannot decide about is shown, and makes an error at the end.
func testFrames(c *pcapng.Reader, eng verdictEngine, all []matcher.Ruleset, warn io.Writer, show func(frameVerdict)) error {
	var failed, cut, n int // n: the last frame's number
	var first error
	for {
		var f pcapng.Frame
		if err := c.Next(&f); err == io.EOF {
			break
		} else if err != nil {
			return fmt.Errorf("after frame %d: %w", n, err)
		}
		n = f.Number
		if len(f.Data) < f.Length {
			cut++
		}
		fv := frameVerdict{Number: n, Length: f.Length, Captured: len(f.Data)}
		v, err := eng.Verdict(f.Data)
		if err != nil {
			if failed++; first == nil {
				first = fmt.Errorf("frame %d: %w", n, err)
			}
			fv.Verdict, fv.Error = "error", err.Error()
			show(fv)
			continue
		}
		fv.Verdict = v.Action.String()
		if v.Action != matcher.Pass {
			fv.Ruleset, fv.Context = &all[v.Ruleset].Name, &v.Context
		}
		if v.Action == matcher.Deliver {
			fv.EOM, fv.Key, fv.Offset = &v.EOM, v.Key[:v.NKey], &v.Offset
		}
		show(fv)
	}
	tellSkipped(warn, c)
	if cut > 0 {
		fmt.Fprintf(warn, "warning: %d of %s cut short by the capture: the verdicts are about the bytes in the file; capture with -s 0\n", cut, count(n, "frame"))
	}
	if failed > 0 {
		return fmt.Errorf("%d of %s without a verdict, the first: %w", failed, count(n, "frame"), first)
	}
	return nil
}

// report prints verdicts.
type report struct {
	frame func(frameVerdict)
	end   func() error
}

// newTextReport prints a line per frame at once. Write errors are reported when the writer
// is flushed.
func newTextReport(w *bufio.Writer, all []matcher.Ruleset, engine string) report {
	width := len("RULESET")
	for _, rs := range all {
		width = max(width, len(rs.Name))
	}
	counts := make(map[string]int)
	total := 0
	line := func(a ...any) {
		s := fmt.Sprintf("%7v %11v  %-9v  %-*v  %7v  %-3v  %10v  %v", a[0], a[1], a[2], width, a[3], a[4], a[5], a[6], a[7])
		fmt.Fprintln(w, strings.TrimRight(s, " "))
	}
	line("FRAME", "LENGTH", "VERDICT", "RULESET", "CONTEXT", "EOM", "OFFSET", "KEY")
	return report{
		frame: func(f frameVerdict) {
			total++
			counts[f.Verdict]++
			length, ruleset, context, eom, offset, last := fmt.Sprint(f.Length), "-", "-", "-", "-", f.Error
			if f.Captured < f.Length {
				length = fmt.Sprintf("%d/%d", f.Captured, f.Length)
			}
			if f.Ruleset != nil {
				ruleset, context = *f.Ruleset, fmt.Sprint(*f.Context)
			}
			if f.EOM != nil {
				eom, offset = map[bool]string{true: "yes", false: "no"}[*f.EOM], fmt.Sprint(*f.Offset)
				var words []string
				for _, k := range f.Key {
					words = append(words, fmt.Sprintf("%08x", k))
				}
				last = strings.Join(words, " ")
			}
			line(f.Number, length, f.Verdict, ruleset, context, eom, offset, last)
		},
		end: func() error {
			fmt.Fprintf(w, "%s, engine %s: %d deliver, %d malformed, %d pass", count(total, "frame"), engine, counts["deliver"], counts["malformed"], counts["pass"])
			if n := counts["error"]; n > 0 {
				fmt.Fprintf(w, ", %d error", n)
			}
			return w.WriteByte('\n')
		},
	}
}

// newJSONReport prints one document at the end.
func newJSONReport(w io.Writer, engine string) report {
	doc := struct {
		Schema int            `json:"schema"`
		Engine string         `json:"engine"`
		Frames []frameVerdict `json:"frames"`
	}{1, engine, []frameVerdict{}}
	return report{
		frame: func(f frameVerdict) { doc.Frames = append(doc.Frames, f) },
		end:   func() error { return writeJSON(w, doc) },
	}
}

// rulesTable numbers the rulesets of a file, and gives each a context of its
// own.
func rulesTable(all []matcher.Ruleset) *matcher.Table {
	t := &matcher.Table{Entries: make(map[int]matcher.Entry, len(all))}
	for i, rs := range all {
		format := rs.Format
		if format == "" {
			format = "packet"
		}
		t.Entries[i] = matcher.Entry{Ruleset: rs, Context: uint16(i), Format: matcher.FormatByName(format)}
	}
	return t
}

// rulesName is the name of a path's file in errors.
func rulesName(path string) string {
	if path == "-" {
		return "standard input"
	}
	return path
}

// parseRules reads a rules file, and returns its rulesets or all its errors.
func parseRules(cmd *cobra.Command, path string) ([]matcher.Ruleset, []error) {
	in := cmd.InOrStdin()
	if path != "-" {
		f, err := regular.Open(path)
		if err != nil {
			return nil, []error{err}
		}
		defer f.Close()
		in = f
	}
	all, err := matcher.ParseFile(rulesName(path), in)
	if err == nil {
		return all, nil
	}
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		return nil, many.Unwrap()
	}
	return nil, []error{err}
}

// complain shows the errors of a rules file on standard error, bad lines with a caret,
// and returns an error that only counts them. If the file cannot be opened or read, it
// returns that error instead.
func complain(cmd *cobra.Command, path string, errs []error) error {
	if pathErr := (*fs.PathError)(nil); errors.As(errs[0], &pathErr) {
		return errs[0]
	}
	for _, err := range errs {
		fmt.Fprintln(cmd.ErrOrStderr(), err)
		if pe := (*matcher.ParseError)(nil); errors.As(err, &pe) && pe.Text != "" {
			fmt.Fprintln(cmd.ErrOrStderr(), pe.Detail())
		}
	}
	return fmt.Errorf("%s: %s", rulesName(path), count(len(errs), "error"))
}

// readRules reads a rules file, and shows the errors of an invalid one.
func readRules(cmd *cobra.Command, path string) ([]matcher.Ruleset, error) {
	all, errs := parseRules(cmd, path)
	if len(errs) > 0 {
		return nil, complain(cmd, path, errs)
	}
	return all, nil
}

// count returns "1 frame", "2 frames".
func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
