// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/xspin/xspin/eval"
	"mvdan.cc/sh/v3/syntax"
)

// A docCommand is a command of a fenced shell block.
type docCommand struct {
	where string
	words []string // from the program on, without sudo
}

func (c docCommand) String() string { return c.where + ": " + strings.Join(c.words, " ") }

// docCommands returns the commands of xspin and make in the shell blocks of the documents,
// also those that another one starts (lab exec).
func docCommands(t *testing.T) (all []docCommand) {
	t.Helper()
	files, err := filepath.Glob("../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	files = append(files, "../README.md", "../CONTRIBUTING.md")
	fenced := regexp.MustCompile("(?ms)^```(?:sh)?\n(.*?)^```$")
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		// All fences are in pairs: those of other languages must not leave one over.
		blocks := regexp.MustCompile("(?ms)^```.*?^```$").FindAllString(string(text), -1)
		for _, block := range blocks {
			m := fenced.FindStringSubmatch(block)
			if m == nil {
				continue
			}
			all = append(all, shellCommands(file, m[1])...)
		}
	}
	return all
}

// shellCommands returns those of a shell script. What is no script, such as a table that
// a command has printed, has none.
func shellCommands(where, script string) (all []docCommand) {
	f, err := syntax.NewParser().Parse(strings.NewReader(script), where)
	if err != nil {
		// A table, or a tree of files; but a typing error must not hide commands.
		for line := range strings.Lines(script) {
			if regexp.MustCompile(`^(sudo |(\S*/)?xspin |make )`).MatchString(line) {
				all = append(all, docCommand{where, []string{"unparsable:", err.Error()}})
				break
			}
		}
		return all
	}
	syntax.Walk(f, func(n syntax.Node) bool {
		call, ok := n.(*syntax.CallExpr)
		if !ok {
			return true
		}
		var words []string
		for _, w := range call.Args {
			words = append(words, wordText(w))
		}
		for i := 0; i < len(words); i++ {
			switch w := words[i]; {
			case w == "sudo" || w == "env" || strings.Contains(w, "=") && i > 0:
				continue
			case w == "make" || isXspin(w):
				c := docCommand{where, words[i:]}
				if dash := slices.Index(c.words, "--"); dash > 0 && dash+1 < len(c.words) && isXspin(c.words[dash+1]) {
					all = append(all, docCommand{where, c.words[dash+1:]})
				}
				all = append(all, c)
			}
			break
		}
		return true
	})
	return all
}

// isXspin tells whether a program is ours, or the one of docs/handlers.md.
func isXspin(w string) bool { return path.Base(w) == "xspin" || path.Base(w) == "ownxspin" }

// wordText is a word as the shell would make it, where variables have the value X.
func wordText(w *syntax.Word) string {
	var b strings.Builder
	var parts func([]syntax.WordPart)
	parts = func(ps []syntax.WordPart) {
		for _, p := range ps {
			switch p := p.(type) {
			case *syntax.Lit:
				b.WriteString(p.Value)
			case *syntax.SglQuoted:
				b.WriteString(p.Value)
			case *syntax.DblQuoted:
				parts(p.Parts)
			default:
				b.WriteByte('X')
			}
		}
	}
	parts(w.Parts)
	return b.String()
}

// parses returns an error if xspin does not take these arguments.
func parses(args []string) error {
	cmd, rest, err := newRootCmd(eval.Commands()...).Find(args)
	if err != nil {
		return err
	}
	cmd.InitDefaultHelpFlag()
	if cmd.DisableFlagParsing {
		return nil
	}
	if err := cmd.ParseFlags(rest); err != nil {
		return err
	}
	if cmd.Flags().Changed("help") {
		return nil
	}
	if err := cmd.ValidateArgs(cmd.Flags().Args()); err != nil {
		return err
	}
	return cmd.ValidateRequiredFlags()
}

// makes returns an error if the Makefile does not have a target or a variable.
func makes(makefile string, args []string) error {
	for _, a := range args {
		pattern := "(?m)^" + regexp.QuoteMeta(a) + "(?: [^:\n]*)?:(?:[^=\n]|$)"
		if name, _, ok := strings.Cut(a, "="); ok {
			pattern = "(?m)^" + regexp.QuoteMeta(name) + " *:="
		}
		if !regexp.MustCompile(pattern).MatchString(makefile) {
			return fmt.Errorf("the Makefile has no %s", a)
		}
	}
	return nil
}

// Every command that the documents tell somebody to type is one that there is, with flags
// and arguments that it takes. Those that neither change anything nor wait are also run,
// as they stand. Of the others, scripts/session_test.go runs the README's session,
// scripts/newuser_test.go make demo, scripts/install_test.go make install, own_test.go the
// program of docs/handlers.md, and the tests of each command in a lab those with --serve;
// make test, bench and soak take too long.
func TestCommandsOfTheDocuments(t *testing.T) {
	makefile, err := os.ReadFile("../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	all := docCommands(t)
	seen := map[string]int{}
	for _, c := range all {
		var err error
		switch {
		case c.words[0] == "unparsable:":
			err = fmt.Errorf("no shell script")
		case c.words[0] == "make":
			seen["make"]++
			err = makes(string(makefile), c.words[1:])
		default:
			seen["xspin"]++
			if err = parses(c.words[1:]); err == nil && len(c.words) > 2 && c.words[1] == "ddt" && (c.words[2] == "ls" || c.words[2] == "describe") {
				seen["run"]++
				var out bytes.Buffer
				if err = xspin(t.Context(), nil, &out, io.Discard, c.words[1:]...); err == nil && out.Len() == 0 {
					err = fmt.Errorf("it prints nothing")
				}
			}
		}
		if err != nil {
			t.Errorf("%v: %v", c, err)
		}
	}
	if seen["make"] < 4 || seen["xspin"] < 30 || seen["run"] < 4 {
		t.Errorf("found %v: the documents have more", seen)
	}
}

// Examples of --help are typed as well.
func TestExamplesOfTheHelp(t *testing.T) {
	found := 0
	var visit func(cmd *cobra.Command)
	visit = func(cmd *cobra.Command) {
		for line := range strings.Lines(cmd.Example) {
			for _, c := range shellCommands(cmd.CommandPath()+" --help", strings.TrimSpace(line)) {
				found++
				if c.words[0] == "unparsable:" {
					t.Errorf("%v", c)
				} else if isXspin(c.words[0]) {
					if err := parses(c.words[1:]); err != nil {
						t.Errorf("%v: %v", c, err)
					}
				}
			}
		}
		for _, sub := range cmd.Commands() {
			visit(sub)
		}
	}
	visit(newRootCmd(eval.Commands()...))
	if found < 40 {
		t.Errorf("found %d examples", found)
	}
}

func TestWhatIsNoCommandIsFound(t *testing.T) {
	for script, want := range map[string]string{
		"sudo bin/xspin lab upp":                               "upp",
		"bin/xspin ddt lss":                                    "lss",
		"sudo bin/xspin demo file --serv":                      "--serv",
		"xspin ctx show":                                       "NAME is missing",
		"sudo bin/xspin lab exec host -- bin/xspin snd FILE":   "snd",
		"until xspin ctx show a b; do sleep 1; done":           "unexpected argument",
		"sudo env \"PATH=$PATH\" make demoo COUNT=5":           "demoo",
		"make demo CUONT=5":                                    "CUONT",
		"printf x | sudo bin/xspin send --to 10.0.0.1 --mod -": "--mod",
	} {
		var errs []string
		for _, c := range shellCommands("test", script) {
			err := makes("COUNT := 1\ndemo: build ## x\n", c.words[1:])
			if c.words[0] != "make" {
				err = parses(c.words[1:])
			}
			if err != nil {
				errs = append(errs, err.Error())
			}
		}
		if len(errs) != 1 || !strings.Contains(errs[0], want) {
			t.Errorf("%s: errors %q, want one about %q", script, errs, want)
		}
	}
}
