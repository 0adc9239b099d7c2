// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/xspin/xspin/ddt"
)

// A typeList is what `ddt ls` prints.
type typeList struct {
	Schema       int              `json:"schema"`
	Applications []listedApp      `json:"applications"`
	Predefined   []predefinedType `json:"predefined"`
}

// A listedApp is an application's datatype. Bytes and blocks are those of the defaults.
type listedApp struct {
	Name     string     `json:"name"`
	Help     string     `json:"help"`
	Origin   string     `json:"origin"`
	Elements int64      `json:"elements"` // in a message
	Bytes    int64      `json:"bytes"`    // of a message
	Blocks   int64      `json:"blocks"`
	End      int64      `json:"touched_end"` // after the last byte
	Params   []appParam `json:"params"`
}

type appParam struct {
	Name    string `json:"name"`
	Help    string `json:"help"`
	Default int64  `json:"default"`
	Min     int64  `json:"min"`
	Max     int64  `json:"max"`
}

type predefinedType struct {
	Name   string `json:"name"`
	Size   int64  `json:"size"`
	Extent int64  `json:"extent"`
}

func newDDTLsCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "ls [NAME]",
		Short: "List the types that have a name, or describe one",
		Long: `List the datatypes of applications, with what a message has by default, and the
predefined types. With NAME: what the application's parameters are, in which
ranges, and where the shape is from.`,
		Example: `  xspin ddt ls
  xspin ddt ls MILC
  xspin ddt ls --json`,
		Args: wantArgs("[NAME]"),
		RunE: func(cmd *cobra.Command, args []string) error {
			l, err := listTypes(strings.Join(args, ""))
			if err != nil {
				return fmt.Errorf("ddt ls: %w", err)
			}
			switch w := cmd.OutOrStdout(); {
			case asJSON:
				return writeJSON(w, l)
			case len(args) == 0:
				return l.print(w)
			case len(l.Applications) > 0:
				return l.Applications[0].print(w)
			default:
				p := l.Predefined[0]
				_, err := fmt.Fprintf(w, "%s is a predefined type: size %d, extent %d\n", p.Name, p.Size, p.Extent)
				return err
			}
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document")
	return cmd
}

// listTypes returns all types that have a name, or the one of this name. As with Resolve,
// an application's goes before a predefined one.
func listTypes(name string) (*typeList, error) {
	l := &typeList{Schema: 1, Applications: []listedApp{}, Predefined: []predefinedType{}}
	for _, a := range ddt.Apps() {
		if name != "" && !strings.EqualFold(a.Name, name) {
			continue
		}
		x, err := listApp(a)
		if err != nil {
			return nil, err
		}
		l.Applications = append(l.Applications, x)
	}
	if name != "" && len(l.Applications) > 0 {
		return l, nil
	}
	for _, s := range ddt.Predefined() {
		if name != "" && s != name {
			continue
		}
		t, _ := ddt.Lookup(s) // known, because it is listed
		l.Predefined = append(l.Predefined, predefinedType{s, t.Size(), t.Extent()})
	}
	if len(l.Predefined) == 0 {
		_, _, err := ddt.Resolve(name)
		if err == nil {
			err = fmt.Errorf("type %s has no name: `xspin ddt describe` shows it", name)
		}
		return nil, err
	}
	return l, nil
}

func listApp(a ddt.App) (listedApp, error) {
	t, n, err := a.Make(nil)
	if err != nil {
		return listedApp{}, err
	}
	c, err := ddt.Commit(t, n)
	if err != nil {
		return listedApp{}, err
	}
	_, end := c.Bounds()
	x := listedApp{
		Name: a.Name, Help: a.Help, Origin: a.Origin,
		Elements: n, Bytes: c.Size(), Blocks: c.Blocks(), End: end, Params: []appParam{},
	}
	for _, p := range a.Params {
		x.Params = append(x.Params, appParam(p))
	}
	return x, nil
}

func (l *typeList) print(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "APPLICATION\tBYTES\tBLOCKS\tBUFFER\tPARAMETERS")
	for _, a := range l.Applications {
		var params []string
		for _, p := range a.Params {
			params = append(params, fmt.Sprintf("%s=%d", p.Name, p.Default))
		}
		fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%s\n", a.Name, a.Bytes, a.Blocks, a.End, strings.Join(params, " "))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	sizes := map[int64][]string{}
	for _, p := range l.Predefined {
		sizes[p.Size] = append(sizes[p.Size], p.Name)
	}
	fmt.Fprintln(w, "\nSIZE\tPREDEFINED")
	for _, n := range slices.Sorted(maps.Keys(sizes)) {
		fmt.Fprintf(w, "%d\t%s\n", n, strings.Join(sizes[n], " "))
	}
	return w.Flush()
}

func (a *listedApp) print(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintf(w, "%s\t%s\n", a.Name, a.Help)
	fmt.Fprintf(w, "origin\t%s\n", a.Origin)
	fmt.Fprintf(w, "message\t%s of %d bytes, in a buffer of %d\n", count64(a.Elements, "element"), a.Bytes, a.End)
	if len(a.Params) == 0 {
		fmt.Fprintln(w, "parameters\tnone")
		return w.Flush()
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w, "\nPARAMETER\tDEFAULT\tRANGE\tWHAT")
	for _, p := range a.Params {
		fmt.Fprintf(w, "%s\t%d\t%d to %d\t%s\n", p.Name, p.Default, p.Min, p.Max, p.Help)
	}
	fmt.Fprintf(w, "\nsuch as %s(%s=%d)\n", a.Name, a.Params[0].Name, a.Params[0].Default)
	return w.Flush()
}
